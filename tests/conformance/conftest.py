"""With which arguments our own techniques are tried where those of their examples are too large for a test."""

import bz2
import json
import os
from functools import cache
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from conformance import Case
from conformance.case import tiny
from conformance.workshop import text, workshop
from core.pretrain_datamodule import PretrainDataModule
from plugins.networks.gpt import GPT
from tests.conformance.compatibility import SHORT
from tests.support import slurm
from tests.support.archives import page, response, write_archive
from tests.support.books import epub, lines, pdf
from tests.support.harness_tasks import write_tasks
from tests.support.raw_folders import write_mds, write_texts
from tests.support.stack_exchange import answer, posts, question
from tests.support.stored_networks import store
from tests.support.stored_reward_model import store_reward_model
from tests.support.wiki import dump, wiki_page
from toolkit.hashed_ngrams import HashedNGrams
from toolkit.quality_model import QualityModel

ROTARY = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "max_sequence_length": 16,
          "position": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}  # fmt: skip
SINUSOIDAL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16, "position": "sinusoidal",
              "norm_position": "post", "tie_embeddings": False, "bias": False}  # fmt: skip

FAMILY = {
    "n_layer": 2,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 16,
    "max_sequence_length": 16,
    "intermediate_size": 32,
}
SPARSE = FAMILY | {"intermediate_size": 16, "n_experts": 4, "experts_per_token": 2}
DOTS = SPARSE | {"expert_size": 8, "dense_layers": 1}
LATENT = {key: value for key, value in DOTS.items() if key != "n_kv_head"} | {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6, "groups": 1, "groups_per_token": 1,
}  # fmt: skip
MIDDLE = {"packing": {"class_path": "Concatenate"}, "prefix": 1, "suffix": 2, "middle": 3, "end_of_text": 0}
WITH_EXPERTS = {"model": {"network": {"class_path": "Mixtral", "init_args": SPARSE | {"vocab_size": 1024}}}}
WITH_BIASES = {"model": {"network": {"class_path": "Dots1", "init_args": DOTS | {"vocab_size": 1024}}}}
MIXERS = [
    "gated_delta_net",
    "attention",
    "gated_linear_attention",
    "sliding_window",
    "mamba2",
    "block_sparse",
]
HYBRID = {"n_layer": 6, "mixers": MIXERS, "sliding_window": 4, "sinks": 1, "block_size": 2, "block_stride": 2, "state_size": 4}  # fmt: skip
MAMBA = {"n_layer": 2, "n_embd": 16, "head_dim": 8, "state_size": 4}
GEMMA = FAMILY | {"head_dim": 8, "sliding_window": 4, "global_every": 2, "query_pre_attn_scalar": 8}
STEADY = {"model": {"optimizer": {"init_args": {"lr": 0.05}}}}
"""Laid over runs that enlarge a rounding in 8 steps at the tiny run's rate of 0.25, beyond what is allowed."""
STRETCHED = {"rope_type": "linear", "factor": 2.0}

BY_RANKS = ("agrees_on_two_ranks", "its_figures_agree_on_two_ranks")
ENCODER = {
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 16,
    "intermediate_size": 32,
    "max_sequence_length": 16,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}
ENCODER_DECODER = {
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 16,
    "head_dim": 8,
    "intermediate_size": 32,
    "dropout": 0.0,
}
ROWS = {"data": {"init_args": {"sequence_length": 16, "batch_size": 4}}}
MASKED = ROWS | {"model": {"network": {"init_args": ENCODER}}}
SPANS = ROWS | {"model": {"network": {"init_args": ENCODER_DECODER}}}
"""What is laid over examples that mask tokens, or take spans out."""


def reading(arguments):
    """Returns what is laid over an example that has records of its user."""
    return {"data": {"init_args": arguments}}


TOKENS = dict.fromkeys(
    ("rates_are_sound", "bind_tells_it_the_length"), "the proof counts steps and no tokens"
)


ROLLBACK = {
    "window": 3,
    "sigma": 3.0,
    "rewind_steps": 1,
    "skip_batches": 2,
    "retries": 9,
    "snapshot_every_n_steps": 1,
}
"""A window so narrow that the few steps of a test hold rollbacks."""

SHIFTED = {"idle_costs_nothing": "a rollback, which waits, falls on the steps that are watched"}

IN_MEMORY = {
    "resumes_its_own_state": "snapshots in memory end with the process: a resumed run begins to take them anew"
}

FUSED = {"model": {"optimizer": {"class_path": "AdamW", "init_args": {"lr": 1e-3}}}}
"""fp16 without a wait for the device needs an optimizer that can skip a step by itself."""

OTHER = "the noise is estimated from other parts of the batch: without bias in both, and not the same"
OTHER_PARTS = dict.fromkeys(("its_figures_agree_on_two_ranks", "accumulation_changes_nothing"), OTHER)
MEASURED = {
    "trainer": {
        "callbacks": [{"class_path": "GradientNoiseScale", "init_args": {"every_n_steps": 4, "average": 0.5}}]
    }
}

ROOM = {"model": {"network": {"init_args": {"max_sequence_length": 18}}}}
"""For two virtual tokens in front of the kit's texts."""

FEW_TOKENS = {"model": {"network": {"init_args": {"vocab_size": 320}}}}

LOOKS = {"idle_costs_nothing": "transformers reads positions on the host to find packed sequences"}

ON_A_GPU = ("agrees_on_a_gpu", "resumes_bitwise_on_a_gpu", "idle_costs_nothing_on_a_gpu")
LIMITED = dict.fromkeys(
    ON_A_GPU, "its memory_limit is for CPUs: tests/callbacks runs it on a GPU, whose memory ends by itself"
)
APART = {
    "idle_costs_nothing_on_a_gpu": "in float32 a GPU multiplies each expert's tokens apart; in bf16 it does not wait"
}
OTHER_CODES = {
    "agrees_on_a_gpu": "bitsandbytes' kernels choose another of two 8-bit codes that are as near: 2e-4 after 4 steps"
}
NO_PAIR = {"gradients_are_finite": "one label makes no pair"}
BY_MICRO_BATCH = {"accumulation_changes_nothing": "the divergence is that of a micro-batch, as in the paper"}
WAITS = {"idle_costs_nothing": "text is generated in each step, and each token waits for the device"}
ROUNDING = "rollout/gap is a rounding, and so is a loss whose advantages add up to 0"
ROLLOUTS = WAITS | dict.fromkeys(("its_figures_agree_on_two_ranks", "accumulation_changes_nothing"), ROUNDING)
PPO_ROLLOUTS = ROLLOUTS | {
    "accumulation_changes_nothing": "a batch is a rollout: advantages are normalised over it and mini_batches cut it, so half of "
    "it makes other steps; tests/callbacks/test_rollouts.py accumulates over the parts of one rollout"
}
LOW_TOKENS = {"class_path": "tests.support.rewarded.LowTokens", "init_args": {"below": 160}}

ANSWERS = {"reward": LOW_TOKENS, "samples": 2, "max_new_tokens": 8, "epochs": 2}

KILLED = "killed while its first checkpoint is being written a run has none; tests/distributed/test_kills.py"


@cache
def evaluation_items():
    """Returns a file of evaluation items, some of which are in the texts of the kit."""
    from conformance.transforms import rows

    path = workshop() / "items.jsonl"
    texts = [text for text, *_ in rows()[11:100:10]]
    items = [{"question": text, "answer": f"{text.split()[0]} because {text}"} for text in texts]
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return str(path)


@cache
def word_list():
    """Returns a list of some of the words that the kit's texts are made of."""
    path = workshop() / "words.txt"
    path.write_text("# a list\nalpha\nbeta gamma\n", encoding="utf-8")
    return str(path)


def quality_model():
    """Returns the file of a quality filter that likes some of the words that the kit's texts are made of."""
    path = workshop() / "quality.safetensors"
    ngrams = HashedNGrams(buckets=1024)
    weights = np.zeros(ngrams.buckets, np.float32)
    weights[ngrams.of("alpha beta")], weights[ngrams.of("gamma delta")] = 2, -2
    QualityModel(ngrams, weights, 0.0, {}).write(path)
    return str(path)


@cache
def scoring_checkpoint():
    """Returns a checkpoint of a small network on bytes, with its tokenizer."""
    network = GPT(vocab_size=257, n_layer=1, n_head=2, n_embd=16, max_sequence_length=16)
    arguments = {"vocab_size": 257, "n_layer": 1, "n_head": 2, "n_embd": 16, "max_sequence_length": 16}
    tokenizer = Path(bytes_tokenizer()).read_text(encoding="utf-8")
    return str(store(network, arguments, workshop() / "scoring.ckpt", tokenizer=tokenizer))


def scoring():
    """Returns a transform that scores text with that network."""
    return {
        "class_path": "PerplexityFilter",
        "init_args": {"path": scoring_checkpoint(), "tokens": 24, "window": 16},
    }


@cache
def mds_samples():
    """Returns a folder of the kit's texts in MosaicML's format."""
    return str(write_mds(workshop() / "mds", documents()["text"].to_pylist()))


@cache
def litdata_texts():
    """Returns a folder of the kit's texts as litdata.optimize writes them."""
    return str(
        write_texts(workshop() / "litdata-texts", [{"text": one} for one in documents()["text"].to_pylist()])
    )


def streamed(source, reader):
    """Returns arguments of a data module that tokenises a source while it reads it."""
    return {
        "source": source,
        "reader": {"class_path": reader},
        "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": bytes_tokenizer()}},
        "validation_documents": 8,
        "mask_documents": True,
        "sequence_length": 16,
        "batch_size": 4,
    }


os.environ |= slurm.environment(workshop())
"""For the kit's runs of SlurmEngine; set before the fork server begins, whose processes have what it has."""


def pytest_leyden_cases():
    return list(_cases())


@cache
def harness_folder():
    """A folder with tasks of lm-eval."""
    return write_tasks(workshop() / "lm-eval" / "tasks")


@cache  # some write their data; test modules ask for the cases, too
def _cases():
    return [
        Case("ActivationCheckpointing", {"keep": ["mm"]}),
        Case("BatchSizeRamp", SHORT["BatchSizeRamp"]),
        Case("ActivationOffload", {"min_bytes": 0}),
        Case(
            "RankInvariance",
            {"micro_batches": 3},
            config={"trainer": {"deterministic": True}},  # a GPU needs it
            exempt=dict.fromkeys(BY_RANKS, "ranks do not share a micro-batch"),
        ),
        Case("Compile", SHORT["Compile"]),
        Case("BitsandbytesWeights", {"kind": "nf4"}),
        Case("BitsandbytesWeights", {"kind": "int8", "compute_dtype": "float32"}),
        Case("Float8", {"recipe": "rowwise_with_gw_hp"}),
        Case("Float8", {"recipe": "tensorwise", "layers": ["layers.*.mlp.*"]}),
        # of half the rows gradients are others: no scale at which only the whole batch overflows
        Case("FP16Mixed", {"init_scale": 16384.0}, config=FUSED),
        Case("Adafactor", exempt={"idle_costs_nothing": "torch's reads norms on the host"}),
        Case(
            "DeepSpeedZero",
            {"stage": 2, "offload_optimizer": "cpu"},
            exempt={"idle_costs_nothing": "DeepSpeed reads the norm on the host in each step"},
        ),
        Case(
            "DeepSpeedZero",
            {"stage": 3, "persistence_threshold": 20},
            exempt={"idle_costs_nothing": "DeepSpeed reads the norm on the host in each step"},
        ),
        Case(
            "LanguageFilter", {"languages": ["eu", "it", "sv", "zu"], "min_confidence": 0.0}
        ),  # of the kit's words
        Case("Decontaminate", {"sets": [evaluation_items()], "fields": ["question"]}),
        Case("Decontaminate", {"sets": [evaluation_items()], "fields": ["question"], "action": "cut"}),
        Case("HarmfulContent", {"files": [word_list()], "min_count": 3, "max_share": 0.2}),
        Case("QualityClassifier", {"path": quality_model(), "min_score": 0.5}),
        Case(
            "Evaluate",
            {"every_n_steps": 3, "evaluations": {"loss": evaluation("Perplexity")}},
        ),
        Case("Perplexity", texts_to_evaluate() | {"window": 64, "stride": 16, "max_documents": 6}),
        Case("LMEvalHarness", {"folder": str(harness_folder()), "limit": 2}),
        Case("Calibration", texts_to_evaluate() | {"max_documents": 6}),
        Case(
            "Memorisation",
            texts_to_evaluate() | {"prefix_tokens": 8, "continuation_tokens": 4, "max_documents": 6},
        ),
        Case(
            "NeedleInHaystack",
            texts_to_evaluate() | {"lengths": [200, 300], "depths": [0.0, 0.6], "trials": 1},
        ),
        Case("SampleDiversity", SAMPLED["init_args"]),
        Case(
            "AnswerQuality",
            {
                "source": problems(),
                "prompt": "question",
                "scores": ["squad", "rouge", "bleu", "chrf"],
                "max_new_tokens": 6,
                "max_records": 6,
            },
        ),
        Case("Classification", {"source": labelled()["source"]}, exempt=CLASSES),
        Case("LearnedReward", {"path": reward_model()}),
        Case("RefusalReward", {"model": quality_model(), "field": "harmful"}),
        Case("ToxicityReward", {"files": [word_list()]}),
        Case("ToxicityReward", {"model": quality_model()}),
        Case("UnitTestReward", {"isolated": False, "seconds": 10.0, "workers": 2}),
        Case("QualityClassifier", {"path": quality_model(), "min_score": 0.0, "column": "quality"}),
        Case("PerplexityFilter", scoring()["init_args"] | {"max_perplexity": 320.0, "column": "perplexity"}),
        Case("BERT", ENCODER, config=ROWS),
        Case("T5", ENCODER_DECODER, config=ROWS),
        Case("MaskedLM", config=MASKED),
        Case("MaskedDataModule", config=MASKED),
        Case("SpanCorruption", config=SPANS),
        Case("SpanCorruptionDataModule", config=SPANS),
        Case("CausalLM", {}),
        Case("CausalLM", {"label_smoothing": 0.1, "z_loss": 1e-3, "l2": 1e-3, "chunk_tokens": 10}),
        Case("GPT", ROTARY, config=STEADY),
        Case("GPT", SINUSOIDAL),
        # Embeddings times sqrt(C): a step changes more, and rounding grows.
        Case("Gemma3", GEMMA, tolerance=1e-5),
        Case("Hybrid", FAMILY | HYBRID),
        Case("Llama", FAMILY | {"rope_scaling": STRETCHED}),
        Case("Mamba2", MAMBA),
        Case(
            "BalancedRouting",
            {
                "objective": {"class_path": "CausalLM"},
                "load_balancing": 0.1,
                "z_loss": 0.01,
                "over": "sequence",
            },
            config=WITH_EXPERTS,
        ),
        Case("BiasBalancing", {"rate": 0.01}, config=WITH_BIASES),
        Case("DeepSeekV3", LATENT, exempt=APART),
        Case("Dots1", DOTS, exempt=APART),
        Case("Mixtral", SPARSE, exempt=APART),
        Case("OLMoE", SPARSE, exempt=APART),
        Case("Qwen3MoE", SPARSE | {"head_dim": 8}, exempt=APART),
        *(Case(name, exempt=LIMITED) for name in ("OOMGuard", "BatchSizeFinder")),
        *(Case(name, exempt=OTHER_CODES) for name in ("AdamW8bit", "PagedAdamW8bit")),
        Case("RoutingMonitor", config=WITH_EXPERTS),
        Case("Mistral", FAMILY | {"sliding_window": 4}),
        Case("OLMo2", FAMILY, config=STEADY),
        Case("OLMoHybrid", FAMILY | {"attention_every": 2, "key_dim": 4, "value_dim": 6}),
        Case("Qwen2", FAMILY | {"sliding_window": 4, "max_window_layers": 1}),
        Case("Qwen3", FAMILY | {"head_dim": 8}),
        Case("FillInTheMiddle", MIDDLE | {"rate": 1.0}),
        Case("GradientClip", {"method": "adaptive", "limit": 1.0, "warmup_steps": 3}),
        Case("C4Quality", {"min_sentences": 1, "closed_lines": False}),
        Case("WordDiversity", {"min_unique": 0.01}),
        Case("CodeQuality", {"max_mean_line": None, "max_line": None}),
        Case("EPUBDocuments", config={"data": {"init_args": {"source": str(epub_books())}}}),
        Case("FineWebQuality", {"min_closed_lines": None}),
        Case("GopherQuality", {"min_words": 30, "min_stop_words": 1, "stop_words": ["alpha", "beta"]}),
        Case("GopherRepetition", {"max_top_ngram": {2: 0.9}, "max_repeated_ngrams": {5: 0.9}}),
        Case("GutenbergTexts", config={"data": {"init_args": {"source": str(gutenberg_files())}}}),
        Case("HTMLDocuments", config={"data": {"init_args": {"source": str(html_pages())}}}),
        Case("HuggingFaceDocuments", config={"data": {"init_args": {"source": str(saved_dataset())}}}),
        Case("TaskMixtureDataModule", task_mixture()),
        Case("InitialWeights", config={"model": {"weights": str(stored_weights())}}),
        Case("InstructionDataModule", instructions()),
        Case(
            "InstructionDataModule", instructions() | {"pack": False, "too_long": "cut", "sequence_length": 8}
        ),
        Case("LabelledDataModule", labelled() | {"balance": "sample"}),
        Case(
            "LabelledDataModule",
            labelled() | {"balance": "weights", "pack": True, "too_long": "cut", "sequence_length": 12},
        ),
        Case(
            "SequenceClassification",
            {"labels": ["even", "odd"]},
            config=reading(labelled() | {"balance": "weights"}),
            batch=of_classes,
        ),
        Case(
            "TokenClassification", {"labels": ["0", "1"]}, config=reading(labelled_words()), batch=of_classes
        ),
        Case("Regression", config=reading(numbered()) | STEADY, batch=with_targets),
        Case(
            "RewardModel",
            {"centre": 0.01},
            config=reading(preferences()),
            exempt=NO_PAIR,
        ),
        Case("SupervisedFineTuning", {"weigh": "answer"}, config=reading(instructions())),
        Case("SupervisedFineTuning", {"noise": 5.0, "chunk_tokens": 10}, config=reading(instructions())),
        Case("PromptTuning", {"count": 2}, config=ROOM),
        Case("PTuning", {"count": 2, "hidden": 8}, config=ROOM),
        Case("PTuning", {"count": 2, "encoder": "lstm", "hidden": 8}, config=ROOM),
        Case("PrefixTuning", {"count": 2}),
        Case("BottleneckAdapter", {"size": 4}),
        Case("BottleneckAdapter", {"size": 4, "places": "mlp"}),
        Case("LRFinder", SHORT["LRFinder"]),
        Case("LitdataDataModule", litdata_folder()),
        Case("LitdataDocuments", config={"data": {"init_args": {"source": litdata_texts()}}}),
        Case("MDSDocuments", config={"data": {"init_args": {"source": mds_samples()}}}),
        Case("MixtureDataModule", mixture()),
        # Orthogonalised in bfloat16: where a sum's last bit changes a rounding there, the step changes by 2^-9 of a value.
        # With steps as small as these that stays below what float32 adds, on every processor.
        Case("Muon", {"lr": 2e-5}),
        Case("PDFDocuments", config={"data": {"init_args": {"source": str(pdf_files())}}}),
        Case("ParquetDocuments", config={"data": {"init_args": {"source": str(parquet_file())}}}),
        Case("Pretrained", {"path": neox()}, exempt=LOOKS),
        Case("Pretrained", {"path": neox(), "weights": False}, exempt=LOOKS),
        Case("PretrainedTokenizer", {"path": bytes_tokenizer()}),
        Case("PreferenceDataModule", preferences()),
        Case("PreferenceDataModule", single_answers()),
        Case(
            "Distillation",
            {"teacher": stored_teacher(), "temperature": 2.0, "label_weight": 0.5},
            config=of_bytes(),
        ),
        Case("DPO", {"kind": "ipo"}, config=reading(preferences()) | STEADY, batch=referred, exempt=NO_PAIR),
        Case(
            "DPO",
            {"beta": 0.5, "label_smoothing": 0.1, "chunk_tokens": 20},
            config=reading(preferences()),
            batch=referred,
            exempt=NO_PAIR,
        ),
        Case(
            "KTO", {}, config=reading(single_answers()), batch=referred, exempt=BY_MICRO_BATCH, tolerance=1e-4
        ),
        Case("ORPO", {"weight": 0.5}, config=reading(preferences()), exempt=NO_PAIR),
        Case(  # DPO makes no run without it, which some proofs compare with
            "ReferenceLogProbabilities",
            config=reading(preferences()) | {"model": {"objective": {"class_path": "CausalLM"}}},
        ),
        Case("SimPO", {}, config=reading(preferences()), exempt=NO_PAIR),
        Case("PeriodicCheckpoint", {"every_n_steps": 3}),
        Case("PromptDataModule", prompts(), config=on_policy(), exempt=WAITS, tolerance=1e-4),
        Case("GRPO", {"kl": 0.04}, config=on_policy(), exempt=ROLLOUTS, tolerance=1e-4),
        Case(
            "PPO",
            {"kl": 0.05, "kl_target": 0.01},
            config=on_policy("PPO", epochs=2, mini_batches=2),
            exempt=PPO_ROLLOUTS,
            tolerance=1e-4,
        ),
        Case("RejectionSampling", {}, config=on_policy("RejectionSampling"), exempt=ROLLOUTS),
        Case("TrainingDoctor", {"every_n_steps": 4, "batches": 4}),
        Case("LossBreakdown", {"every_n_steps": 4, "first_bin": 4}),
        Case("CollectiveMonitor", {"every_n_steps": 4}),
        Case("Profile", {"at_step": 3, "steps": 1}),
        Case("EnergyMonitor", {"watts": 100.0, "grams_per_kwh": 400.0}),
        Case("StepTime", {"window": 4, "every_n_steps": 2}),
        Case(
            "AdaptiveBatchSize",
            {"patience": 1},
            config=MEASURED,
            exempt={"agrees_on_two_ranks": OTHER, "its_figures_agree_on_two_ranks": OTHER},
        ),
        Case("ActivationMonitor", {"every_n_steps": 4, "saturation": 1.0}),
        Case("AttentionMonitor", {"every_n_steps": 4, "queries": 4}),
        Case("GradientNoiseScale", {"every_n_steps": 4}, exempt=OTHER_PARTS),
        Case("WeightMonitor", {"every_n_steps": 4, "detail": True}),
        Case("RewardWatch", {"window": 2}, config=watched(), exempt=ROLLOUTS, tolerance=1e-4),
        Case("Rollouts", ANSWERS, config=on_policy(), exempt=ROLLOUTS, tolerance=1e-4),
        Case(
            "PrefixLM",
            {"objective": {"class_path": "CausalLM"}, "max_fraction": 0.5},
            exempt={"gradients_are_finite": "the one label that the proof leaves is of the prefix"},
        ),
        Case("ProgressBar", config={"trainer": {"enable_progress_bar": True}}),
        Case("RandomRestart", SHORT["RandomRestart"]),
        Case("StreamingTextDataModule", streamed(str(parquet_file()), "ParquetDocuments")),
        Case("StoredNetwork", config={"data": {"init_args": {"transforms": [scoring()]}}}),
        Case("SplitBy", {"column": "id"}),  # the kit's text is one source
        Case("SlurmEngine", {"jobs": 2, "poll_seconds": 0.05, "folder": str(workshop() / "slurm")}),
        Case(
            "SOAP",
            {"lr": 0.003, "precondition_frequency": 2},
            config=FEW_TOKENS,  # its statistics of 1,024 rows of embeddings take 50 ms a step
            exempt={
                "honours_weight_decay_by_group": "its first step only collects statistics",
                **dict.fromkeys(
                    (*BY_RANKS, "accumulation_changes_nothing", "agrees_on_a_gpu"),
                    "rounding decides on the basis of what the gradients do not reach",
                ),
            },
        ),
        Case("ScheduleFreeAdamW", {"lr": 0.02, "warmup_steps": 2}),
        Case("ShardedCheckpoint", {"asynchronous": False}),
        Case("ShardedCheckpoint", {"asynchronous": True}, exempt=dict.fromkeys(["resumes_bitwise"], KILLED)),
        Case("SkipStep", {"window": 3, "sigma": 2.0}),
        Case(
            "SequenceLengthSchedule",
            exempt={"accumulation_changes_nothing": "its state says how many micro-batches a step has"},
        ),
        Case("SpikeRollback", {}, exempt=IN_MEMORY),
        Case("SpikeRollback", ROLLBACK, exempt=SHIFTED | IN_MEMORY),
        Case("SpikeRollback", ROLLBACK | {"on_disk": True}, exempt=SHIFTED),
        Case("SourceCode", config={"data": {"init_args": {"source": str(repositories())}}}),
        Case(
            "StackExchangeDump",
            {"min_answers": 0},
            config={"data": {"init_args": {"source": str(stack_exchange())}}},
        ),
        Case("TextSamples", {"num_samples": 1, "every_n_steps": 3, "max_new_tokens": 4}),
        Case(
            "TorchaoAdamW8bit",
            tolerance=1e-4,
            exempt={
                "leaks_nothing": "torchao calls torch.compile in each step, and torch keeps what that returns"
            },
        ),  # float32's last bit decides on codes that are 1 in 100 apart
        Case("UnigramTokenizer", {"vocab_size": 257}),
        Case("WarmupConstant", {"warmup_steps": 3}),
        Case("WarmupCosine", {"warmup_steps": 3}),
        Case("WarmupCosine", {"warmup_tokens": 192, "total_tokens": 512}, exempt=TOKENS),
        Case("WarmupInverseSquareRoot", {"warmup_steps": 3}),
        Case("WARCDocuments", config={"data": {"init_args": {"source": str(web_archive())}}}),
        Case("WikipediaDump", config={"data": {"init_args": {"source": str(wiki_dump())}}}),
        Case("WarmupLinear", {"warmup_steps": 0.25, "total_steps": 6}),
        Case("WarmupSquareRoot", {"warmup_steps": 3}),
        Case("WarmupStableDecay", {"warmup_steps": 3, "decay_steps": 3}),
        Case("WordPieceTokenizer", {"vocab_size": 530}),
    ]


def documents():
    """Returns the kit's text, as columns."""
    lines = text().read_text(encoding="utf-8").splitlines()
    return pyarrow.table({"text": [json.loads(line)["text"] for line in lines]})


def parquet_file():
    """Writes the kit's text as a Parquet file."""
    path = workshop() / "text.parquet"
    pyarrow.parquet.write_table(documents(), path)
    return path


def gutenberg_files():
    """Writes the kit's text as files of Project Gutenberg."""
    folder = workshop() / "gutenberg"
    folder.mkdir(exist_ok=True)
    for number, words in enumerate(documents()["text"].to_pylist()):
        marks = [f"*** {word} OF THE PROJECT GUTENBERG EBOOK {number} ***" for word in ("START", "END")]
        (folder / f"{number}-0.txt").write_text(f"Title: {number}\n\n{marks[0]}\n\n{words}\n\n{marks[1]}\n")
    return folder


def html_pages():
    """Writes the kit's text as a folder of web pages."""
    folder = workshop() / "pages"
    folder.mkdir(exist_ok=True)
    for number, words in enumerate(documents()["text"].to_pylist()):
        (folder / f"{number:03}.html").write_text(
            f"<html lang=en><title>{number}</title><main><p>{words}</p></main>"
        )
    return folder


def epub_books():
    """Writes the kit's text as a folder of EPUB books."""
    folder = workshop() / "books"
    for number, words in enumerate(documents()["text"].to_pylist()):
        epub(folder / f"{number:03}.epub", [words])
    return folder


def pdf_files():
    """Writes the kit's text as a folder of PDF files."""
    folder = workshop() / "pdf"
    folder.mkdir(exist_ok=True)
    for number, words in enumerate(documents()["text"].to_pylist()):
        parts = words.split()
        page = lines(*(" ".join(parts[at : at + 8]) for at in range(0, len(parts), 8)))
        (folder / f"{number:03}.pdf").write_bytes(pdf([page]))
    return folder


def web_archive():
    """Writes the kit's text as a web archive."""
    path = workshop() / "text.warc.gz"
    write_archive(path, [response(page(words)) for words in documents()["text"].to_pylist()])
    return path


def wiki_dump():
    """Writes the kit's text as a dump of MediaWiki."""
    path = workshop() / "text.xml.bz2"
    pages = [wiki_page(number, "T", words) for number, words in enumerate(documents()["text"].to_pylist())]
    path.write_bytes(bz2.compress(dump(pages).encode()))
    return path


def stack_exchange():
    """Writes the kit's text as a dump of Stack Exchange."""
    path = workshop() / "Posts.xml"
    words = [f"<p>{escape(one)}</p>" for one in documents()["text"].to_pylist()]
    rows = [question(2 * n, "T", one) + answer(2 * n + 1, 2 * n, one, 5) for n, one in enumerate(words)]
    path.write_bytes(posts(rows))
    return path


def repositories():
    """Writes the kit's text as a repository of source code."""
    folder = workshop() / "repositories"
    for number, words in enumerate(documents()["text"].to_pylist()):
        path = folder / "one" / f"{number:03}.py"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"# SPDX-License-Identifier: MIT\n{words!r}\n", encoding="utf-8")
    return folder


def saved_dataset():
    """Writes the kit's text as `save_to_disk` of Hugging Face datasets does."""
    folder = workshop() / "saved"
    folder.mkdir(exist_ok=True)
    table = documents()
    path = str(folder / "data.arrow")
    with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    return folder


def stored_weights():
    """Writes a checkpoint of the network of the kit's tiny run."""
    network = tiny([])["model"]["network"]
    init_args = network["init_args"]
    return store(GPT(**init_args), init_args, workshop() / "initial-weights.ckpt", data=False)


def of_bytes():
    """Returns what is laid over a run so that its tokenizer is that of the teacher."""
    return {
        "data": {
            "init_args": {
                "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": bytes_tokenizer()}}
            }
        }
    }


def stored_teacher(vocab_size=1024):
    """Writes a checkpoint of a small network with a tokenizer of bytes; 1,024 token ids are those of the kit's tiny run."""
    init_args = tiny([])["model"]["network"]["init_args"] | {"n_layer": 3, "vocab_size": vocab_size}
    init_args["max_sequence_length"] = 256
    path = workshop() / f"teacher-{vocab_size}.ckpt"
    tokenizer = Path(bytes_tokenizer()).read_text(encoding="utf-8")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = GPT(**init_args)
    # As it begins it is as undecided as its pupil: what differs would be lost in rounding.
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(4.0)
    return str(store(network, init_args, path, tokenizer=tokenizer))


def neox(vocab_size=1024, length=16):
    """Writes a small GPT-NeoX, of which there is no class here, as transformers does; returns the folder."""
    import torch
    import transformers

    folder = workshop() / f"neox-{vocab_size}"
    config = transformers.GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=length,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    return str(folder)


def bytes_tokenizer():
    """Returns the path of a tokenizer.json whose tokens are the end of a text and the 256 bytes."""
    path = workshop() / "bytes" / "tokenizer.json"
    path.parent.mkdir(exist_ok=True)
    vocabulary = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(vocabulary[:1])
    tokenizer.save(str(path))
    return str(path)


def litdata_folder():
    """Returns arguments with a folder of tokens in litdata's format: training and validation are of one stream."""
    from datamodules.preparation.writers.token_shards import TokenShards

    random = np.random.default_rng(0)
    folder = workshop() / "litdata"
    TokenShards(2000).write(
        [random.integers(1, 256, size) for size in random.integers(5, 60, 200)], folder, 256
    )
    return {
        "source": str(folder),
        "tokenizer": {"class_path": "PretrainedTokenizer", "init_args": {"path": bytes_tokenizer()}},
        "packing": "Concatenate",
        "sequence_length": 16,
        "batch_size": 4,
    }


def fine_tuning(name, records):
    """Returns arguments of a data module for fine-tuning on these records, which it encodes with bytes."""
    path = workshop() / f"{name}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    tokenizer = {"class_path": "PretrainedTokenizer", "init_args": {"path": bytes_tokenizer()}}
    rows = {"sequence_length": 16, "batch_size": 4, "cache_dir": str(workshop() / "encoded")}
    return {"source": str(path), "tokenizer": tokenizer, "validation_fraction": 0.1, **rows}


def instructions():
    """Returns arguments with prompts and answers of up to 12 bytes."""
    records = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}"} for n in range(200)]
    return fine_tuning("instructions", records) | {"template": "plain"}


def task_mixture():
    """Returns arguments with two tasks, whose shares change over the run."""
    one = instructions()
    other = fine_tuning("other task", [{"prompt": f"{n}*2=", "completion": f"{2 * n}!"} for n in range(200)])
    shape = {key: one.pop(key) for key in ("sequence_length", "batch_size") if key in one}
    tasks = {name: {"class_path": "InstructionDataModule", "init_args": given | {"template": "plain"}}
             for name, given in (("one", one), ("other", {k: v for k, v in other.items() if k not in shape}))}  # fmt: skip
    return {"tasks": tasks, "weights": {"one": 1.0, "other": [[0, 0.2], [256, 0.8]]}} | shape


def preferences():
    """Returns arguments with pairs of answers to prompts, which differ in length."""
    records = [{"prompt": f"{n}+{n}=", "chosen": f"{2 * n}", "rejected": f"{3 * n}?"} for n in range(200)]
    return fine_tuning("preferences", records) | {"template": "plain"}


def single_answers():
    """Returns arguments with answers to prompts, each desirable or not."""
    records = [
        {"prompt": f"{n}+{n}=", "completion": f"{(2 + n % 2) * n}", "label": n % 2 == 0} for n in range(200)
    ]
    return fine_tuning("answers", records) | {"template": "plain", "paired": False}


def referred(batch):
    """Returns a batch with a reference that finds all answers certain, and is further from the network than any; all are desirable."""
    rows = batch["labels"].shape
    return batch | {"reference": torch.zeros(rows), "desirable": torch.ones(rows, dtype=torch.bool)}


CLASSES = dict.fromkeys(
    ("measures_each_item_alone", "figures_follow_from_sums", "leaves_the_network_alone"),
    "it asks an objective over classes: tests/plugins/evaluations/test_classification.py",
)

SAMPLED = {
    "class_path": "SampleDiversity",
    "init_args": {"prompts": ["alpha", "beta"], "samples": 2, "max_new_tokens": 6},
}


def texts_to_evaluate():
    """Returns arguments of an evaluation on the kit's texts."""
    return {"documents": {"class_path": "TextDocuments", "init_args": {"source": str(text())}}}


def evaluation(name):
    """Returns an evaluation on a few of the kit's texts."""
    return {"class_path": name, "init_args": texts_to_evaluate() | {"max_documents": 2}}


def problems():
    """Returns a file of questions with answers as GSM8K has them."""
    path = workshop() / "problems.jsonl"
    records = [
        {"question": f"What is {n} plus {n}?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
        | {"harmful": n % 2 == 0, "tests": f"assert twice({n}) == {2 * n}"}
        for n in range(200)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def prompts():
    """Returns arguments with prompts of up to 8 bytes."""
    records = [{"prompt": f"{n}+{n}=", "answer": f"{2 * n}"} for n in range(200)]
    return fine_tuning("prompts", records) | {"template": "plain", "sequence_length": 8}


def on_policy(objective="GRPO", **rollouts):
    """Returns what is laid over the tiny run so that it answers prompts; its rewards are of the tests' own."""
    options = ANSWERS | {"epochs": 1} | rollouts
    return {
        "trainer": {"callbacks": [{"class_path": "Rollouts", "init_args": options}]},
        "model": {"objective": {"class_path": objective}},
        "data": {"class_path": "PromptDataModule", "init_args": prompts()},
    }


def reward_model():
    """Returns the checkpoint of a reward model."""
    data = preferences() | {
        "tokenizer": {
            "class_path": "datamodules.preparation.tokenizers.pretrained_tokenizer.PretrainedTokenizer",
            "init_args": {"path": bytes_tokenizer()},
        }
    }
    return str(store_reward_model(workshop() / "reward-model.ckpt", data))


def watched():
    """Returns what is laid over the tiny run so that a further callback finds rollouts."""
    found = on_policy()
    return found | {"trainer": {"callbacks+": found["trainer"]["callbacks"]}}


def labelled():
    """Returns arguments with texts of two classes of unequal size."""
    records = [{"text": f"{n * 7919}", "label": "even" if n % 3 else "odd"} for n in range(200)]
    return fine_tuning("labelled", records)


def labelled_words():
    """Returns arguments with lists of words that have one of two classes."""
    records = [{"text": [str(n), str(n * 7)], "label": [str(n % 2), "1"]} for n in range(200)]
    return fine_tuning("words", records) | {"task": "words"}


def numbered():
    """Returns arguments with texts that have a number."""
    return fine_tuning("numbers", [{"text": f"{n}", "label": n / 100} for n in range(200)]) | {
        "task": "values"
    }


def of_classes(batch):
    """Returns a batch with two classes."""
    return batch | {"labels": batch["labels"].where(batch["labels"] < 0, batch["labels"] % 2)}


def with_targets(batch):
    """Returns a batch with numbers at the labels."""
    return batch | {"targets": batch["labels"].clamp(min=0) / 1000}


def mixture():
    """Returns arguments with two prepared folders, whose shares change over the run."""
    from datamodules.packing.concatenate import Concatenate
    from datamodules.preparation.readers.text_documents import TextDocuments
    from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
    from datamodules.preparation.writers.token_shards import TokenShards

    sources = {}
    for name, word in {"few": "one and two are three. ", "many": "eight or nine? "}.items():
        folder = workshop() / f"text-{name}"
        folder.mkdir()
        for number in range(30):
            (folder / f"{number}.txt").write_text(f"{number}: {word * (1 + number % 5)}", encoding="utf-8")
        tokenizer = PretrainedTokenizer(bytes_tokenizer())
        cache = str(workshop() / "mixture")
        stages = (TextDocuments, tokenizer, TokenShards(), Concatenate())
        data = PretrainDataModule(*stages, source=str(folder), cache_dir=cache)
        data.prepare_data()
        sources[name] = str(data.folder)
    return {
        "sources": sources,
        "weights": {"few": 1.0, "many": [[0, 1.0], [400, 3.0]]},
        "packing": "Concatenate",
        "sequence_length": 16,
        "batch_size": 4,
    }
