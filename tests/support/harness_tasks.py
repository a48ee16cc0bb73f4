"""A folder with tasks of lm-eval, one of each type of request, in words of the small networks' tokenizer."""

import json

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "rain",
    "fell",
    "over",
    "green",
    "hills",
    "and",
    "nobody",
    "saw",
    "where",
    "it",
    "went",
    "at",
    "night",
]

METRICS = {
    "acc": "{metric: acc, aggregation: mean, higher_is_better: true}",
    "acc_norm": "{metric: acc_norm, aggregation: mean, higher_is_better: true}",
    "perplexity": "{metric: perplexity, aggregation: perplexity, higher_is_better: false}",
    "word_perplexity": "{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}",
    "bits_per_byte": "{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}",
    "exact_match": "{metric: exact_match, aggregation: mean, higher_is_better: true}",
}

HEAD = "dataset_path: json\ndataset_kwargs: {data_files: {test: items.jsonl, train: items.jsonl}}\ntest_split: test\n"


def task(name, output_type, lines, *metrics):
    listed = "".join(f"  - {METRICS[metric]}\n" for metric in metrics)
    return f"task: {name}\n{HEAD}output_type: {output_type}\n{lines}metric_list:\n{listed}"


TASKS = {
    "choice": task(
        "choice",
        "multiple_choice",
        'fewshot_split: train\nnum_fewshot: 2\ndoc_to_text: "{{question}}"\ndoc_to_target: answer\ndoc_to_choice: choices\n',
        "acc",
        "acc_norm",
    ),
    "last_word": task(
        "last_word",
        "loglikelihood",
        'doc_to_text: "{{question}}"\ndoc_to_target: " {{choices[0]}}"\n',
        "acc",
        "perplexity",
    ),
    "whole": task(
        "whole",
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: "{{long}}"\n',
        "word_perplexity",
        "bits_per_byte",
    ),
    "written": task(
        "written",
        "generate_until",
        'doc_to_text: "{{question}} "\ndoc_to_target: "{{choices[0]}}"\n'
        "generation_kwargs: {until: [e, zz], max_gen_toks: 12}\n",
        "exact_match",
    ),
}


def write_tasks(folder, count=6, **others):
    """Writes the tasks, and others by name, with `count` documents; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    items = [
        {
            "question": " ".join(WORDS[number : number + 3]),
            "choices": ["a", "b", WORDS[number + 3], "wrong words"],
            "answer": number % 4,
            "long": " ".join(WORDS[number:] + WORDS[::-1]),
        }
        for number in range(count)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    for name, text in {**TASKS, **others}.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder
