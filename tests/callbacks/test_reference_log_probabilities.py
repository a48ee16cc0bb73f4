"""References are those of the initial network, for every record, saved with the position and never computed again."""

import pytest
import torch

from callbacks.reference_log_probabilities import ReferenceLogProbabilities
from core.errors import ConfigError
from datamodules.instruction_datamodule import InstructionDataModule
from datamodules.preference_datamodule import PreferenceDataModule
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.dpo import DPO
from plugins.objectives.kto import KTO
from tests.support.records import build
from tests.support.tiny_training import Record, module, tiny_gpt, trainer
from tests.support.trl_losses import log_probabilities

PAIRS = [
    {"prompt": f"{n}? ", "chosen": "yes" * (1 + n % 4), "rejected": "no" * (1 + n % 5)} for n in range(30)
]
SINGLE = [{"prompt": f"{n}? ", "completion": "yes" * (1 + n % 4), "label": n % 2 > 0} for n in range(30)]
LONG = {"prompt": "?", "chosen": "yes" * 40, "rejected": "no"}


def network(dropout=0.5):
    torch.manual_seed(0)
    return tiny_gpt(vocab_size=300, max_sequence_length=64, dropout=dropout)


def build_pairs(folder, records=PAIRS, **options):
    folder.mkdir(exist_ok=True)
    return build(PreferenceDataModule, folder, records, template="plain", sequence_length=32, **options)


def fit(folder, data, steps, objective=None, callbacks=None, dropout=0.5, **more):
    trained = module(
        lambda: network(dropout),
        objective=objective or DPO(),
        optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    )
    record = Record()
    callbacks = [ReferenceLogProbabilities()] if callbacks is None else callbacks
    runner = trainer(folder, callbacks=[*callbacks, record], max_steps=steps)
    runner.fit(trained, datamodule=data, **more)
    return runner, trained, record


@pytest.mark.parametrize("paired", [True, False])
def test_they_are_those_of_the_initial_network_in_eval_mode(paired, tmp_path):
    data = build_pairs(tmp_path, [*PAIRS, LONG] if paired else SINGLE, paired=paired)
    fit(tmp_path, data, 3, DPO() if paired else KTO())
    initial = network().eval()
    assert data.references.keys() == {"train", "validation"}
    unknown = 0
    for split, (records, rows), batches in data.every_record():
        table = data.references[split]
        assert table.shape == (records, rows) == (data.manifest["records"][split], 2)
        known = torch.zeros(records, dtype=torch.bool)
        for batch in batches:
            found = log_probabilities(initial.logits(initial(batch)), batch["labels"]).sum(1)
            real = batch["records"][:, 0] >= 0
            expected = table[batch["records"][real, 0], torch.arange(int(real.sum())) % 2]
            torch.testing.assert_close(found[real], expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(batch["reference"][real, 0], expected, rtol=0, atol=0)
            known[batch["records"][real, 0]] = True
        assert torch.equal(table.isnan().any(1), ~known)
        unknown += int((~known).sum())
    assert unknown == paired  # the record that is too long for a row


def test_the_first_step_has_no_margin_and_everything_is_put_back(tmp_path):
    """Without dropout, which moves the network in training, but not the reference."""
    _, trained, record = fit(tmp_path, build_pairs(tmp_path), 1, dropout=0.0)
    assert record.figures[0]["train/loss"] == pytest.approx(0.693147, abs=1e-5)
    assert record.figures[0]["train/reward_margin"] == pytest.approx(0, abs=1e-5)
    assert record.figures[0]["train/tokens"] > 4
    assert isinstance(trained.objective, DPO)
    assert all(part.training for part in trained.modules())


def test_a_resumed_run_and_validate_take_them_from_the_checkpoint(tmp_path, capsys):
    data = build_pairs(tmp_path)
    _, _, whole = fit(tmp_path, data, 4)
    path = tmp_path / "two.ckpt"
    again = build_pairs(tmp_path / "again")
    first, _, record = fit(tmp_path / "again", again, 2)
    first.save_checkpoint(path)
    capsys.readouterr()
    resumed = build_pairs(tmp_path / "again")
    second, trained, rest = fit(tmp_path / "again", resumed, 4, ckpt_path=path, weights_only=True)
    assert "under the initial network" not in capsys.readouterr().err
    assert [f["train/loss"] for f in record.figures + rest.figures] == [
        f["train/loss"] for f in whole.figures
    ]
    second.save_checkpoint(path)
    (figures,) = second.validate(trained, datamodule=build_pairs(tmp_path / "again"), ckpt_path=path, verbose=False, weights_only=True)  # fmt: skip
    assert figures["val/reward_accuracy"] > 0
    assert figures["val/reward_margin"] != 0


def test_a_checkpoint_without_them_is_explained(tmp_path):
    runner, _, _ = fit(tmp_path, build_pairs(tmp_path), 1, CausalLM(), callbacks=[])
    runner.save_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(ConfigError, match=r"begun without ReferenceLogProbabilities.*\n.*--model.weights"):
        fit(tmp_path, build_pairs(tmp_path), 2, ckpt_path=tmp_path / "one.ckpt", weights_only=True)


def test_a_checkpoint_of_other_records_is_explained(tmp_path):
    data = build_pairs(tmp_path)
    data.references |= {"train": torch.zeros(3, 2), "validation": torch.zeros(1, 2)}
    with pytest.raises(ConfigError, match=r"references? log-probabilities of \(3, 2\).*\n.*data.source"):
        build_pairs(tmp_path).load_state_dict(data.state_dict())


def test_other_data_is_explained(tmp_path):
    records = [{"prompt": f"{n}", "completion": "b"} for n in range(60)]
    data = build(InstructionDataModule, tmp_path, records, template="plain")
    with pytest.raises(
        ConfigError, match=r"InstructionDataModule keeps no references. Take --data=PreferenceDataModule"
    ):
        fit(tmp_path, data, 1, CausalLM())
