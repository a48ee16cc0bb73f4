"""The kit's proof of optional hooks notices methods that cannot be called, and nothing else; techniques of ours offer some."""

import pytest
from lightning.pytorch import Callback
from torch.optim import SGD

from conformance.offers import BY_ALL, OFFERED_BY, faults
from core import catalog, contracts
from toolkit.transform_counts import KeepsCounts


class NoArgument(Callback):
    def change_network(self):
        pass


class TakesMore(Callback):
    def pause_clock(self, trainer):
        pass


class Half(SGD):
    def eval(self):
        pass


class OfAnInstance(Callback):
    def preflight(self, run, own):
        yield "it does not fit"


class Sound(Callback):
    @classmethod
    def preflight(cls, run, own):
        yield "it does not fit"

    def change_network(self, network, again=False):
        pass

    def pause_clock(self):
        pass


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        (
            "callbacks",
            NoArgument,
            "change_network(self) cannot be called as ChangesNetwork.change_network(self, network",
        ),
        ("callbacks", TakesMore, "missing a required argument: 'trainer'"),
        ("callbacks", OfAnInstance, "preflight(self, run, own) cannot be called as ChecksRun.preflight(run"),
        ("optimizers", Half, "AveragesWeights has the methods eval, train; train is missing"),
    ],
)
def test_hooks_that_cannot_be_called_are_noticed(kind, target, said):
    [found] = faults(kind, target)
    assert said in found


def test_hooks_that_can_be_called_are_not():
    assert list(faults("callbacks", Sound)) == []
    assert list(faults("callbacks", Callback)) == []


@pytest.mark.parametrize(
    ("kind", "name", "protocols"),
    [
        ("strategies", "FSDP", {"ClipsGradients", "HasStepContext", "NormsGradients", "RunsAsForward"}),
        ("strategies", "DDP", set()),
        ("precision", "Float8", {"ChangesNetwork"}),
        ("checkpoints", "ShardedCheckpoint", {"ConnectsRanks", "SavesParts", "ReadsParts", "WaitsForDisk"}),
        ("checkpoints", "AtomicCheckpoint", {"ReadsParts", "WaitsForDisk"}),
        ("loggers", "MetricsCSV", {"GoesBack"}),
        ("loggers", "Trackio", {"GoesBack"}),
        ("callbacks", "ActivationCheckpointing", {"ChangesNetwork"}),
        ("callbacks", "Throughput", {"PausesClock"}),
        ("optimizers", "AdEMAMix", {"BindsToLength"}),
        ("data", "Normalise", set()),
        ("data", "Decontaminate", {"KeepsCounts"}),
        ("data", "ExactDuplicates", {"KeepsCounts"}),
        ("data", "PersonalData", {"KeepsCounts"}),
        ("data", "RepeatedLines", {"KeepsCounts"}),
        ("data", "RepeatedSentences", {"KeepsCounts"}),
        ("data", "RepeatedSubstrings", {"KeepsCounts"}),
        ("datamodules", "PretrainDataModule", {"CountsEpochs", "SkipsBatches"}),
    ],
)
def test_techniques_of_ours_offer_what_callers_ask_for(kind, name, protocols):
    target = catalog.find(name, kind).load()
    assert {each.__name__ for each in OFFERED_BY[kind] if issubclass(target, each)} == protocols


def test_every_protocol_has_one_question_and_a_docstring():
    offers = {
        name: one
        for name, one in vars(contracts.offers).items()
        if getattr(one, "_is_protocol", False) and name != "Protocol"
    }
    assert offers.keys() <= set(contracts.__all__)
    for name, one in offers.items():
        assert one.__doc__, name
    asked = {each for group in (BY_ALL, *OFFERED_BY.values()) for each in group}
    assert asked - {KeepsCounts} <= set(offers.values())
