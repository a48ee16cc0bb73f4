"""Every technique that leyden registers keeps every promise of its kind: registering is what gets it tested."""

import pytest
from lightning.pytorch import Callback

from conformance import NotProvable, cases, proofs
from core import catalog
from core.training.every_step import BATCH_HOOKS
from tests.conformance.conftest import ON_A_GPU, pytest_leyden_cases

CASES = cases("leyden", pytest_leyden_cases())


DEAR = (
    "resumes_bitwise",
    "resumes_its_own_state",
    "agrees_on_two_ranks",
    "its_figures_agree_on_two_ranks",
    "accumulation_changes_nothing",
)
"""Proofs that take runs of their own."""


BY_RANKS = ("agrees_on_two_ranks", "its_figures_agree_on_two_ranks")


SHARED = (*BY_RANKS, "accumulation_changes_nothing")
"""What depends on an optimizer or a schedule only if it looks beyond the gradients, which are reduced by then."""


HELD_ELSEWHERE = {
    # tests/distributed and tests/plugins/strategies: each is one process under accumulation, and resumes bitwise
    "strategies": (
        "resumes_bitwise",
        "resumes_its_own_state",
        "agrees_on_two_ranks",
        "accumulation_changes_nothing",
    ),
    # a run saves and loads the same state: a_saved_state_goes_on_bitwise and resumes_its_rates, without a run
    "optimizers": ("resumes_bitwise", "resumes_its_own_state"),
    "schedules": ("resumes_bitwise", "resumes_its_own_state"),
}
"""Kind -> proofs whose promise other tests of CI hold at less cost: they are slow."""


ON_THE_SAME_PARTS = {
    "BERT",
    "DeepSeekV3",
    "Dots1",
    "Gemma3",
    "Mamba2",
    "MaskedLM",
    "Mistral",
    "OLMo2",
    "OLMoE",
    "OLMoHybrid",
    "Qwen2",
    "Qwen3",
    "Qwen3MoE",
    "SpanCorruption",
    "SpanCorruptionDataModule",
    "T5",
}
"""Techniques whose runs on ranks and over a kill are made by the same code as GPT's, Llama's and Hybrid's, or are runs of
MaskedDataModule or of its like: they are CI's. Networks on two ranks, which tests/distributed/test_families.py and the
objectives' own runs have in CI, are slow."""


TRACKERS = {"Mlflow", "Wandb"}
"""Loggers that start processes of others, or write their databases, which takes seconds in each run: their own tests are runs in
the real trackers, and what needs further runs is slow."""


IN_SOME_STEPS = {"Evaluate", "SpikeReport"}
"""Callbacks that do much in some steps and nothing in others: whether they leave something behind shows after hundreds."""


def works_in_steps(target):
    """Returns whether a technique has a hook that is called in each step, and could keep something of each."""
    return any(
        name in vars(base) for base in target.__mro__[:-1] for name in BATCH_HOOKS if base is not Callback
    )


def marks(case, proof):
    """Returns how often a promise is tested: what other tests prove as well is slow, what is dear, as two processes are, mostly CI's.

    RayEngine's own tests are on two machines; tests/test_configs.py has the examples of all. A run reads
    finished tokens: how they were prepared makes a difference to it through the packing alone, which has its own cases.
    """
    if proof.gpu:
        return [pytest.mark.gpu]
    if proof.name == "builds_from_yaml" or (case.entry.name == "RayEngine" and proof.contract == "Engine"):
        return [pytest.mark.slow]
    kind = case.entry.kind
    prepares = kind == "data" and "Packing" not in {base.__name__ for base in case.target.__mro__}
    alike = case.entry.name in ON_THE_SAME_PARTS
    if (prepares and proof.name in DEAR) or proof.name in HELD_ELSEWHERE.get(kind, ()):
        return [pytest.mark.slow]
    if alike and kind == "networks" and proof.name == "agrees_on_two_ranks":
        return [pytest.mark.slow]
    further = case != next(other for other in CASES if other.entry == case.entry)
    seldom = further or (kind in ("optimizers", "schedules") and proof.name in SHARED)
    again = (further or prepares) and proof.name == "config_round_trips"
    alike = alike and proof.name in (*DEAR, "can_be_cut_along_its_tokens")
    # hundreds of steps where the count after few is not the same as without the technique
    steady = kind == "callbacks" and works_in_steps(case.target) and case.entry.name not in IN_SOME_STEPS
    long = proof.name == "leaks_nothing" and not steady
    if case.entry.name in TRACKERS and proof.name in (*DEAR, "config_round_trips", "leaks_nothing"):
        return [pytest.mark.slow]
    tasks = case.entry.name == "SlurmEngine" and proof.contract == "Engine"  # which a process each takes up
    each = proof.name == "its_fingerprint_tells_texts_apart"  # reads all documents again for each change
    if long or again or (seldom and proof.name in DEAR):
        return [pytest.mark.slow]
    ranks = proof.name in BY_RANKS  # a run of two processes
    return [pytest.mark.ci] * (each or alike or ranks or tasks)


PROMISES = [
    pytest.param(
        case,
        proof,
        id=f"{case.entry.name}-{proof}",
        marks=marks(case, proof),
    )
    for case in CASES
    for proof in proofs(case)
]


@pytest.fixture(scope="module")
def one_ray():
    """Ray on this machine, for all runs of RayEngine: to start it takes seconds."""
    from datamodules.preparation.engines.ray_engine import _cluster

    with _cluster("local"):
        yield


@pytest.mark.parametrize(("case", "proof"), PROMISES)
def test_promise(case, proof, request):
    if case.entry.name == "RayEngine" and proof.contract == "Engine" and case.absent() is None:
        request.getfixturevalue("one_ray")
    try:
        proof(case)
    except NotProvable as reason:
        pytest.skip(str(reason))


def test_no_technique_is_left_out():
    ours = {entry for entry in catalog.entries() if entry.package == "leyden"}
    assert {case.entry for case in CASES} == ours
    assert len(ours) > 20


def test_few_of_ours_are_exempt():
    exempt = {case.entry.name: set(case.exempt) for case in CASES if case.exempt}
    tokens = {"rates_are_sound", "bind_tells_it_the_length"}
    schedules = {name: proofs for name, proofs in exempt.items() if proofs <= tokens}
    assert exempt == schedules | {
        "Adafactor": {"idle_costs_nothing"},
        "DeepSpeedZero": {"idle_costs_nothing"},
        "SOAP": {
            "honours_weight_decay_by_group",
            "agrees_on_two_ranks",
            "its_figures_agree_on_two_ranks",
            "accumulation_changes_nothing",
            "agrees_on_a_gpu",
        },
        **{
            name: {"idle_costs_nothing_on_a_gpu"}
            for name in ("DeepSeekV3", "Dots1", "Mixtral", "OLMoE", "Qwen3MoE")
        },
        **{name: set(ON_A_GPU) for name in ("OOMGuard", "BatchSizeFinder")},
        **{name: {"agrees_on_a_gpu"} for name in ("AdamW8bit", "PagedAdamW8bit")},
        "ShardedCheckpoint": {"resumes_bitwise"},
        "SequenceLengthSchedule": {"accumulation_changes_nothing"},
        "PrefixLM": {"gradients_are_finite"},
        "Pretrained": {"idle_costs_nothing"},
        "TorchaoAdamW8bit": {"leaks_nothing"},
        "SpikeRollback": {"idle_costs_nothing"},  # where it goes back in the middle
        "PromptDataModule": {"idle_costs_nothing"},
        **{
            name: {"gradients_are_finite"} for name in ("RewardModel", "DPO", "ORPO", "SimPO")
        },  # one label is no pair
        "KTO": {"accumulation_changes_nothing"},
        # the noise of gradients is estimated from parts of a batch, which ranks and micro-batches are
        "AdaptiveBatchSize": {"agrees_on_two_ranks", "its_figures_agree_on_two_ranks"},
        # a step is its micro-batches of `batch_size` rows on any number of ranks, where the kit halves the rows
        "RankInvariance": {"agrees_on_two_ranks", "its_figures_agree_on_two_ranks"},
        "GradientNoiseScale": {"its_figures_agree_on_two_ranks", "accumulation_changes_nothing"},
        # its objective is one of labels, whose data are of another kind: it has tests of its own
        "Classification": {
            "figures_follow_from_sums",
            "leaves_the_network_alone",
            "measures_each_item_alone",
        },
        **{
            # text is generated; roundings are figures
            name: {"idle_costs_nothing", "its_figures_agree_on_two_ranks", "accumulation_changes_nothing"}
            for name in ("GRPO", "PPO", "RejectionSampling", "RewardWatch", "Rollouts")
        },
    }
