"""Techniques that are broken where it is easily missed, and their sound twins."""

GPT_SIZES = {
    "init_args": {"vocab_size": 64, "max_sequence_length": 16, "n_layer": 1, "n_head": 2, "n_embd": 8}
}


MODULES = {
    "callbacks": "callbacks",
    "networks": "networks",
    "objectives": "objectives",
    "optimizers": "optimizers",
    "data": "fingerprints",
    "strategies": "callbacks",
    "commands": "commands",
}
"""Kind -> module of tests.conformance.broken."""


SABOTAGES = [  # proof, kind, technique, what the message says, its sound twin, arguments of both
    ("documents_are_isolated", "networks", "AttendingAcross", "document 1 of a row", "GPT", GPT_SIZES),
    ("documents_are_isolated", "networks", "ConvolvingAcross", "document 1 of a row", "Sound", {}),
    ("documents_are_isolated", "networks", "CountingOn", "document 1 of a row", "GPT", GPT_SIZES),
    ("a_cache_changes_nothing", "networks", "SecondPiece", "a piece of 3 tokens behind 5", "Sound", {}),
    ("padding_changes_nothing", "networks", "SeeingPadding", "the prompts: those of row 0", "GPT", GPT_SIZES),
    ("padding_changes_nothing", "networks", "CountingPadding", "the prompts: those of row 0", "GPT", GPT_SIZES),
    ("padding_changes_nothing", "networks", "KeepingPadding", "with rows [2, 0, 0, 1]", "GPT", GPT_SIZES),
    ("counts_flops", "networks", "FlopsOfABatch", "FlopCounterMode counts", "Sound", {}),
    ("counts_flops", "networks", "FlopsOfNothing", "FlopCounterMode counts", "Sound", {}),
    ("sums_are_additive", "objectives", "TrainingMean", "total of loss in training", "TrainingTerm", {}),
    ("ignored_labels_do_not_count", "objectives", "TrainingAll", "loss in training: ", "TrainingTerm", {}),
    ("sums_are_additive", "objectives", "TrainingDivision", "total of loss in training", "TrainingTerm", {}),
    ("elementwise_treats_each_weight_alone", "optimizers", "Normed", "after step 1", "Elementwise", {}),
    ("elementwise_treats_each_weight_alone", "optimizers", "Averaging", "after step 1", "Elementwise", {}),
    ("its_fingerprint_tells_results_apart", "data", "LongUntold", "with most = ", "Long", {}),
    ("its_fingerprint_tells_results_apart", "data", "Containing", "with without = ", "Long", {}),
    ("its_fingerprint_tells_results_apart", "data", "Shouting", "with capitals = ", "Long", {}),
    ("its_fingerprint_tells_tokens_apart", "data", "Lower", "with lower = True", "BPETokenizer", {}),
    ("its_fingerprint_tells_texts_apart", "data", "FieldUntold", "with text_field = 'title'", "JSONLinesDocuments", {}),
    ("its_fingerprint_tells_texts_apart", "data", "Field", "the same `options` and `tasks`", "JSONLinesDocuments", {}),
    ("answers_a_mistake_in_short", "commands", "crashing", "with a path to nothing it ends with", "careful", {}),
    ("answers_a_mistake_in_short", "commands", "tracing", "without arguments it ends with", "careful", {}),
    ("resumes_its_own_state", "callbacks", "Uncounted", "its attribute Uncounted.steps: '4' and '8'", "Diligent", {}),
    ("resumes_its_own_state", "callbacks", "Unrestored", "state.callbacks.Unrestored.steps: 4 and 8", "Diligent", {}),
    ("its_figures_agree_on_two_ranks", "callbacks", "OwnRank", "own/inputs: ", "Diligent", {}),
    ("accumulation_changes_nothing", "callbacks", "CountingBatches", "in two micro-batches and in one", "Diligent", {}),
    ("accumulation_changes_nothing", "callbacks", "ScalingBatches", "in two micro-batches and in one", "Diligent", {}),
    ("accumulation_changes_nothing", "callbacks", "LoggingBatches", "own/again: it is logged in step", "Diligent", {}),
    ("accumulation_changes_nothing", "strategies", "Multiplying", "in two micro-batches and in one", "Single", {}),
    ("leaks_nothing", "callbacks", "Hoarding", "leaves 2.0 objects", "Caching", {}),
    ("leaks_nothing", "callbacks", "HoardingElsewhere", "leaves 1.0 objects", "Diligent", {}),
    ("its_state_is_plain", "callbacks", "Tensors", "steps: a tensor for a single value", "Diligent", {}),
    ("its_state_is_plain", "callbacks", "Live", "largest: this tensor changed after", "Diligent", {}),
    ("its_state_is_plain", "callbacks", "Sets", "seen: a set", "Diligent", {}),
    ("watching_changes_nothing", "callbacks", "Meddling", "with it, and without:", "Watching", {}),
]  # fmt: skip


SOUND = {
    ("callbacks", "Diligent"),
    ("callbacks", "Accumulating"),
    ("networks", "Refusing"),
    *((kind, twin) for _, kind, _, _, twin, _ in SABOTAGES),
}
