import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer

from callbacks.text_samples import TextSamples
from core.errors import ConfigError
from toolkit.generation.texts import printable
from toolkit.sampling import generate


def test_samples_are_printed_kept_and_logged(run):
    text = (run.folder / "samples.txt").read_text()
    heads = [line for line in text.splitlines() if line.startswith("=== ")]
    assert heads == [
        f"=== step {step}, max_new_tokens 12, temperature 0.8, top_k 50, seed 0" for step in (40, 60)
    ]
    assert text.count("--- The\nThe") == text.count("--- If you\nIf you") == 2
    assert run.stdout.count("Samples at step ") == 2
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    tags = [f"samples/{number}/text_summary" for number in (0, 1)]
    assert set(tags) <= set(events.Tags()["tensors"])
    assert [event.step for event in events.Tensors(tags[0])] == [40, 60]


def test_a_sample_is_what_generate_gives(run):
    samples = TextSamples(num_samples=2, max_new_tokens=20, temperature=1.0, top_k=None, seed=7)
    tokenizer = Tokenizer.from_str(run.trainer.datamodule.tokenizer_json)
    found = samples._continuations(run.trainer, run.module)
    for number, (prompt, continuation) in enumerate(found):
        ids = tokenizer.encode(prompt).ids
        new = generate(run.module.network, ids, max_new_tokens=20, seed=7 + number, stop_id=256)
        assert prompt + continuation == tokenizer.decode([*ids, *new])
    assert found[0][1] != found[1][1]


def test_sampling_changes_neither_generators_nor_modes(run):
    network, samples = run.module.network, TextSamples(max_new_tokens=8)
    network.train()
    network.dropout.eval()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    samples._sample(run.trainer, run.module)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert (network.training, network.embedding.training, network.dropout.training) == (True, True, False)
    network.dropout.train()


def test_the_trained_weights_are_bitwise_those_of_a_run_without_samples(fit, tmp_path):
    options = {"max_steps": 20, "limit_val_batches": 0}
    with_samples = fit(tmp_path, [TextSamples(every_n_steps=3, max_new_tokens=4)], **options)
    without = fit(tmp_path, [], **options)
    assert (tmp_path / "samples.txt").read_text().count("=== step") == 7  # 3, 6, ... 18 and the end
    for a, b in zip(with_samples.module.parameters(), without.module.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_step_of_several_batches_is_sampled_once(fit, tmp_path):
    samples = TextSamples(every_n_steps=2, max_new_tokens=2)
    fit(tmp_path, [samples], max_steps=4, accumulate_grad_batches=3, limit_val_batches=0)
    heads = [line[:10] for line in (tmp_path / "samples.txt").read_text().splitlines() if line[:3] == "==="]
    assert heads == ["=== step 2", "=== step 4"]


def test_by_default_only_the_end_is_sampled(fit, tmp_path):
    fit(tmp_path, [TextSamples(max_new_tokens=2)], max_steps=4, limit_val_batches=0)
    text = (tmp_path / "samples.txt").read_text()
    assert text.count("=== step") == text.count("=== step 4,") == 1
    assert text.count("--- ") == 3


def test_without_a_tokenizer_it_says_once_why_there_are_no_samples(fit, data, tmp_path, capfd):
    plain = data()
    del plain.tokenizer_json
    fit(tmp_path, [TextSamples(every_n_steps=2)], data=plain, max_steps=6, limit_val_batches=0)
    said = "TextSamples: no samples, because the data module offers no tokenizer_json."
    assert capfd.readouterr().err.count(said) == 1
    assert not (tmp_path / "samples.txt").exists()


def test_a_network_that_no_rank_holds_whole_is_left_out(run, tmp_path, capfd):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        network = type(run.module.network)()
        fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
        module = type("Module", (), {"network": network})
        assert TextSamples()._cannot(run.trainer, module)
        assert "no rank has the full network" in capfd.readouterr().err
        assert not TextSamples()._cannot(run.trainer, run.module)
    finally:
        dist.destroy_process_group()


def test_control_characters_do_not_reach_the_terminal():
    assert printable("a\x1b[31m\x07b\n\tc\u202ed é") == "a\ufffd[31m\ufffdb\n\tc\ufffdd é"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"num_samples": 2, "prompts": ["x"]}, "num_samples is 2, and there are 1"),
        ({"num_samples": 1, "prompts": [""]}, "none of them empty"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 must be 0"),
    ],
)
def test_wrong_arguments_are_named(options, named):
    with pytest.raises(ConfigError, match=named):
        TextSamples(**options)


def test_defaults_fit_the_trainer_without_a_data_module(run, make_trainer, tmp_path):
    assert isinstance(trainer := make_trainer(tmp_path, []), Trainer)
    assert TextSamples()._cannot(trainer, run.module)


class NotFinite(Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        with torch.no_grad():
            pl_module.network.embedding.weight.fill_(torch.nan)


def test_weights_that_are_not_finite_do_not_end_the_run(fit, tmp_path, capsys):
    run = fit(tmp_path, [TextSamples(every_n_steps=2), NotFinite()], max_steps=4, limit_val_batches=0)
    assert run.trainer.global_step == 4
    assert "TextSamples, step 4: " in capsys.readouterr().err + run.stdout
