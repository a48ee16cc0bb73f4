"""Each proof of the kit fails for a technique that breaks its promise, and says what was measured."""

import importlib
from contextlib import suppress

import pytest

from core import catalog
from core.catalog import KINDS
from core.errors import ConfigError
from core.testing import Case, NotProvable, proofs, prove
from tests.conftest import Packages

MODULES = {"callbacks": "callbacks", "loggers": "callbacks", "strategies": "callbacks", "precision": "callbacks",
           "networks": "networks", "objectives": "objectives", "optimizers": "optimizers",
           "schedules": "optimizers", "stages": "stages", "datamodules": "stages", "commands": "commands"}  # fmt: skip
"""Kind -> module of tests.conformance.broken."""

HIDDEN = {"trainer": {"gradient_clip_val": None}}

SMALL = {"init_args": {"vocab_size": 64, "max_sequence_length": 16, "n_layer": 2, "n_head": 2, "n_embd": 8}}

BROKEN = [  # proof, kind, technique, what the message says, arguments
    ("builds_from_yaml", "callbacks", "Unbuildable", "takes window >= 1, not 0", {}),
    ("config_round_trips", "callbacks", "Opaque", "cannot be read back: clock: ", {}),
    ("trains", "callbacks", "Diverging", "loss that is not finite, step 2", {}),
    ("trains", "callbacks", "Stopping", "ended after 3 of 8 steps", {}),
    ("trains", "loggers", "Writing", "`fit` ended with exit code", {}),
    ("resumes_bitwise", "callbacks", "Forgetful", "losses.7: ", {}),
    ("agrees_on_two_ranks", "callbacks", "RankDependent", "on two ranks", {}),
    ("agrees_on_two_ranks", "strategies", "Unaveraged", "on two ranks", {}),
    ("agrees_on_two_ranks", "datamodules", "Rows", "the same rows in step 1, 2, 3", {}),
    ("idle_costs_nothing", "callbacks", "Syncing", "2 waits in steps 2 and 7, 0 without it", {}),
    ("idle_costs_nothing", "callbacks", "Copying", "broken/callbacks.py", {}),
    ("idle_costs_nothing", "callbacks", "DoingNothing", "on_after_backward does nothing", {}),
    ("computes_what_one_device_does", "strategies", "Approximate", "without", {"config": HIDDEN}),
    ("stays_near_float32", "precision", "Rough", "in float32", {}),
    ("stays_near_float32", "precision", "Idle", "in float32", {}),
    ("gives_other_rows_in_each_step", "datamodules", "Constant", "steps (1, 2) are given the same rows", {}),
    ("validation_is_the_same_each_time", "datamodules", "Wandering", "have validation losses [", {}),
    ("returns_logits_for_each_token", "networks", "Truncating", "not (2, 1, ", {}),
    ("stages_compute_what_forward_does", "networks", "Forgetful", "they differ by", SMALL),
    ("attends_through_what_it_is_given", "networks", "Deaf", "0 calls of 2 blocks", SMALL),
    ("is_causal", "networks", "Peeking", "from position 1 on change the logits before it", {}),
    ("blocks_are_submodules", "networks", "Copied", "block 0 is no module", {}),
    ("starts_on_the_meta_device", "networks", "Halfway", "init_weights leaves out scale", {}),
    ("parallel_plan_names_modules", "networks", "Misplanned", "there is no module blocks.0", {}),
    ("counts_flops", "networks", "Weightless", "0 at T = 8", {}),
    ("a_cache_changes_nothing", "networks", "Miscounting", "of the largest logit", {}),
    ("a_cache_changes_nothing", "networks", "Shared", "a new cache is not empty", {}),
    ("sums_are_additive", "objectives", "MeanOfMeans", "for 4 rows", {}),
    ("ignored_labels_do_not_count", "objectives", "CountingAll", "with rows that have no label", {}),
    ("ignored_labels_do_not_count", "objectives", "Penalised", "of a batch without labels: nan", {}),
    ("gradients_are_finite", "objectives", "Penalised", "not finite with no label", {}),
    ("gradients_are_finite", "objectives", "Detached", "depends on no parameter", {}),
    ("lowers_a_quadratic", "optimizers", "Climbing", "from ", {}),
    ("honours_weight_decay_by_group", "optimizers", "DecayingAll", "weight_decay 0 changed", {}),
    ("its_state_can_be_stored", "optimizers", "Nested", "'moments' of a parameter's state is a dict", {}),
    ("a_saved_state_goes_on_bitwise", "optimizers", "Forgetting", "1 steps after loading", {}),
    ("rates_are_sound", "schedules", "Negative", "step 26 has (-", {}),
    ("groups_keep_their_ratio", "schedules", "Absolute", "step 0: rates 0.1 and 0.1", {}),
    ("resumes_its_rates", "schedules", "Restarting", "step 71: ", {}),
    ("bind_tells_it_the_length", "schedules", "BoundOnce", "it goes on with", {}),
    ("reads_the_same_each_time", "stages", "Shuffled", "second pass: 120 documents for 120", {}),
    ("its_fingerprint_tells_texts_apart", "stages", "PathAlone", "the same fingerprint", {}),
    ("its_fingerprint_tells_texts_apart", "stages", "Timed", "two instances with the same arguments", {}),
    ("its_fingerprint_tells_tokens_apart", "stages", "Upper", "the same fingerprint", {}),
    ("its_tokens_are_its_text", "stages", "Shifted", "encode_batch gives", {}),
    ("its_tokens_are_its_text", "stages", "Lossy", "comes back as", {}),
    ("trains_the_same_tokenizer", "stages", "Random", "another the second time", {}),
    ("looks_at_each_document_alone", "stages", "FirstOfBatch", "in batches of 1 and of 1000, ", {}),
    ("does_the_same_in_another_process", "stages", "Hashing", "in another process, and in this one", {}),
    ("does_the_same_in_another_process", "stages", "Unpicklable", "pickle", {}),
    ("leaves_names_and_order", "stages", "Renumbering", "is no row of the input", {}),
    ("leaves_names_and_order", "stages", "Silent", "0 were reported to `drop`", {}),
    ("its_fingerprint_tells_results_apart", "stages", "Unversioned", "the same fingerprint", {}),
    ("does_each_task_once", "stages", "Doubling", "have the results [0, 0, 1, 1", {}),
    ("raises_what_a_task_raises", "stages", "Forgiving", "is lost", {}),
    ("raises_what_a_task_raises", "stages", "Rephrasing", "arrives as RuntimeError(", {}),
    ("does_a_dead_processs_task_again", "stages", "Fragile", "BrokenProcessPool", {}),
    ("does_a_dead_processs_task_again", "stages", "Tireless", "was done 13 times, and the run not", {}),
    ("what_it_writes_is_read_back", "stages", "Narrow", "token 0 is [34464], not [100000]", {}),
    ("what_it_writes_is_read_back", "stages", "Dropping", "token 5 is [6], not [5]", {}),
    ("writes_the_same_bytes", "stages", "Stamped", "written twice, written is not the same", {}),
    ("labels_are_the_next_tokens", "stages", "Unshifted", "token 0 is labelled 0", {}),
    ("labels_are_the_next_tokens", "stages", "Repeating", "twice", {}),
    ("ranks_share_each_batch", "stages", "RankBlind", "batch 0 holds other rows", {}),
    ("a_pass_can_begin_anywhere", "stages", "OneOrder", "two epochs are in the same order", {}),
    ("imports_nothing_heavy", "commands", "heavy", "imports torch", {}),
    ("refuses_an_unknown_argument", "commands", "careless", "exit code 0", {}),
    ("refuses_an_unknown_argument", "commands", "verbose", "lines or more", {}),
    ("has_a_summary", "commands", "breaking", "it does not end with a full stop", {}),
]  # fmt: skip

SOUND = [("callbacks", "Mindful"), ("callbacks", "Paired"), ("networks", "Sound"), ("objectives", "Sound"), ("optimizers", "Sound"),
         ("precision", "Fine"), ("stages", "Here"), ("stages", "Untouched")]  # fmt: skip

DECLARED = '''
from lightning.pytorch import Callback
from core.contracts import Network
from core.technique import technique

@technique(paper="a blog post", conflicts={"Other": "both stop the run"})
class Guard(Callback):
    """Guards.

    Args:
        limit: The highest loss.

    Example:
        trainer:
          callbacks+:
            - class_path: Guard
    """
    def __init__(self, limit: float = 1.0): ...
'''

MISDECLARED = [  # proof, what is replaced in DECLARED, by what, what the message says
    ("imports", "@technique", "1 / 0\n@technique", "cannot be imported: ZeroDivisionError"),
    ("leads_to_its_name", "    def", "\nclass Watch: ...\nGuard = Watch\nif 0:\n    def", "leads to 'Watch'"),
    ("is_declared", "a blog post", " ", "@technique(paper=...) is empty"),
    ("is_for_this_api", '"a blog post"', '"", api=">=99"', "written for core API >=99"),
    ("is_of_its_kind", "Guard(Callback)", "Guard(Network)", "does not derive from lightning"),
    ("is_documented", "limit: The", "other: The", "`Args:` does not describe limit"),
    ("shows_an_example", "class_path: Guard", "class_path: Gard", "does not name Guard"),
    ("conflicts_raise", "both stop the run", " ", "the conflict with Other has no reason"),
    ("conflicts_raise", '"Other"', '"acme.Other"', "with acme.Other it is not refused"),
    ("conflicts_raise", '"Other"', '"Guard"', "it is declared to conflict with itself"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Registers every technique of tests.conformance.broken."""
    folder = tmp_path_factory.mktemp("site-packages")
    chosen = {(kind, name) for _, kind, name, *_ in BROKEN} | set(SOUND)
    entries = {}
    for kind, name in sorted(chosen):
        value = f"tests.conformance.broken.{MODULES[kind]}:{name}"
        entries.setdefault(f"leyden.{kind}", {})[name] = value
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        Packages(folder).add("broken_techniques", entries)
        yield
    catalog.entries.cache_clear()


def the(proof, case):
    [found] = [item for item in proofs(case) if item.name == proof]
    return found


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("proof", "kind", "name", "told", "options"), BROKEN, ids=lambda part: part)
def test_a_broken_promise_is_noticed(proof, kind, name, told, options):
    case = Case(name, kind=kind, **options)
    with pytest.raises(AssertionError) as caught:
        the(proof, case)(case)
    message = str(caught.value)
    assert message.startswith(f"{name} of broken_techniques 1.2 breaks {proof}: ")
    assert told in message


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(("kind", "name"), SOUND, ids=lambda part: part)
def test_what_is_sound_is_not_complained_of(kind, name):
    case = Case(name, kind=kind)
    for proof in proofs(case):
        # what all kinds have in common is tried with the callbacks
        if proof.runs and (kind in ("callbacks", "precision") or len(proof.kinds) == 1):
            with suppress(NotProvable):
                proof(case)


@pytest.mark.parametrize(("proof", "old", "new", "told"), MISDECLARED, ids=lambda part: part[:20])
def test_a_broken_declaration_is_noticed(proof, old, new, told, packages):
    assert old in DECLARED
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED.replace(old, new))
    case = Case("Guard")
    with pytest.raises(AssertionError) as caught:
        the(proof, case)(case)
    assert str(caught.value).startswith(f"Guard of acme 1.2 breaks {proof}: ")
    assert told in str(caught.value)


def test_what_is_declared_well_is_not_complained_of(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED)
    case = Case("Guard")
    for proof in proofs(case):
        if not proof.runs:
            proof(case)


def test_a_name_of_two_packages_is_noticed(packages):
    for package in ("acme", "zeta"):
        packages.add(package, {"leyden.callbacks": {"Guard": f"{package}:Guard"}}, DECLARED)
    case = Case(next(entry for entry in catalog.entries() if entry.package == "acme"))
    with pytest.raises(AssertionError, match="registered 2 times"):
        the("has_a_name_of_its_own", case)(case)


def test_every_proof_has_a_technique_that_breaks_it():
    named = {proof for proof, *_ in BROKEN} | {proof for proof, *_ in MISDECLARED}
    every = {proof.name for kind in KINDS for proof in proofs(kind)}
    assert every - named == {"has_a_name_of_its_own"}  # which takes two packages: the test above
    assert named <= every


def test_all_that_is_broken_is_said_at_once(packages):
    source = DECLARED.replace("a blog post", " ").replace("Example:", "See:")
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, source)
    with pytest.raises(AssertionError) as caught:
        prove("Guard", limit=2.0)
    message = str(caught.value)
    assert [line.partition(":")[0] for line in message.split("\n\n")] == [
        "Guard of acme 1.2 breaks is_declared",
        "Guard of acme 1.2 breaks shows_an_example",
    ]


def test_an_exempt_promise_is_not_tested(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED)
    case = Case("Guard", exempt={"resumes_bitwise": "it looks at the clock"})
    with pytest.raises(NotProvable, match="it looks at the clock"):
        the("resumes_bitwise", case)(case)


def test_an_exemption_from_no_proof_is_refused(packages):
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, DECLARED)
    with pytest.raises(ConfigError, match="no proof 'resume_bitwise' to be exempt from"):
        proofs(Case("Guard", exempt={"resume_bitwise": "it looks at the clock"}))


def test_a_technique_without_what_it_needs_is_not_run(packages):
    source = DECLARED.replace('post"', 'post", needs=[Package("no-such-package>=2")]').replace(
        "import technique", "import Package, technique"
    )
    packages.add("acme", {"leyden.callbacks": {"Guard": "acme:Guard"}}, source)
    case = Case("Guard")
    with pytest.raises(NotProvable, match="no-such-package is not installed"):
        the("trains", case)(case)
    the("is_documented", case)(case)


def test_the_broken_modules_hold_nothing_unused():
    named = {name for _, _, name, *_ in BROKEN} | {name for _, name in SOUND} | {"Changed"}
    for module in set(MODULES.values()):
        members = vars(importlib.import_module(f"tests.conformance.broken.{module}")).items()
        own = {name for name, item in members if getattr(item, "__module__", "").endswith(f"broken.{module}")}
        assert own <= named
