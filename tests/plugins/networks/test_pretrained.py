"""`Pretrained`: logits and gradients of the wrapped model, weights from safetensors, generation, refusals."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
import yaml
from lightning.pytorch import seed_everything

from core.errors import ConfigError
from plugins.networks.parts.recorded_initialisation import recorded_starts
from plugins.networks.pretrained import Pretrained
from plugins.strategies.fsdp import FSDP
from plugins.strategies.tensors import local_shard, part
from tests.support.cli_runs import checkpoint, core, state  # noqa: F401
from tests.support.fake_ranks import shards
from tests.support.reference_models import tokens
from toolkit.generation.rows import Rows
from toolkit.initial_values import draw_part
from toolkit.safetensors_files import LazyTensor

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 32}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

MODELS = {
    "GPT-NeoX": transformers.GPTNeoXConfig(**SIZES),
    "GPT-2, tied": transformers.GPT2Config(
        **SIZES, n_positions=32, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0
    ),
    "Gemma 2, caps and windows": transformers.Gemma2Config(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_implementation="eager"
    ),
    "Mixtral, stacked": transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4),
    "ModernBERT, truncated": transformers.ModernBertDecoderConfig(
        **SIZES | dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    ),
    "Mamba, state": transformers.MambaConfig(**SIZES, state_size=4),
}


def saved(name, folder):
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_gradients_and_generated_tokens_are_the_models(name, tmp_path):
    model = saved(name, tmp_path / "m").eval()
    network = Pretrained(str(tmp_path / "m")).eval()
    assert len(network.blocks) == 2
    ids = tokens(length=20, vocab_size=64)
    ours, theirs = network.logits(network({"input_ids": ids})), model(ids, use_cache=False).logits
    assert torch.equal(ours, theirs)
    for logits in (ours, theirs):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    expected = {key: weight.grad for key, weight in model.named_parameters()}
    found = {key.removeprefix("model."): weight.grad for key, weight in network.named_parameters()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)

    greedy = model.generate(ids[:1, :5], max_new_tokens=8, do_sample=False)[0, 5:].tolist()
    for cached in (True, False):
        with torch.no_grad():
            rows = Rows(network, [ids[0, :5].tolist()], 8, cached)
            new = [int(rows.first().argmax())]
            while len(new) < 8:
                new.append(int(rows.step([0], new[-1:]).argmax()))
        assert new == greedy, cached


class Counted(Pretrained):
    """Notes how many numbers are read at once."""

    deferred_init = True

    def initial_value(self, name, tensor):
        start = super().initial_value(name, tensor)
        if not isinstance(start, LazyTensor):
            return start

        def read_part(place):
            Counted.parts.append(start.part(place))
            return Counted.parts[-1]

        return replace(start, read=pytest.fail, read_part=read_part)


@pytest.mark.parametrize("name", ["Gemma 2, caps and windows", "GPT-NeoX"])
def test_each_rank_reads_its_part_of_the_file_and_no_more(name, tmp_path):
    expected = dict(saved(name, tmp_path / "m").named_parameters())
    Counted.parts = []
    with shards(lambda: Counted(str(tmp_path / "m")), FSDP(), 3, 8) as module:
        own = dict(module.network.model.named_parameters())
        other = [
            n for n, p in expected.items() if not torch.equal(local_shard(own[n]), part(p.detach(), own[n]))
        ]
    assert other == []
    sizes = [local_shard(parameter).numel() for parameter in own.values()]
    assert sorted(part.numel() for part in Counted.parts) == sorted(size for size in sizes if size)


@pytest.mark.parametrize(
    "name", ["GPT-2, tied", "Gemma 2, caps and windows", "Mixtral, stacked", "ModernBERT, truncated"]
)
def test_each_rank_draws_its_part_of_random_weights(name, tmp_path):
    saved(name, tmp_path / "m")
    config(pad_token_id=9)(tmp_path / "m")

    def build():
        return Pretrained(str(tmp_path / "m"), weights=False)

    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "m")
    )
    seed_everything(0, verbose=False)
    expected = {key: weight.detach() for key, weight in build().model.named_parameters()}
    own_names = expected.keys()  # a tied head is a copy in theirs
    for key, weight in ((key, weight) for key, weight in theirs.named_parameters() if key in own_names):
        spread = float(weight.detach().std())
        assert float(expected[key].std()) == pytest.approx(spread, rel=0.1), key
        assert spread > 0 or torch.equal(expected[key], weight), key
    table = expected[next(key for key in expected if "embed" in key or "wte" in key)]
    assert bool(table[9].any()) == name.startswith(
        ("GPT-2", "ModernBERT")
    )  # no row of padding, or random, too
    with shards(build, FSDP(), 1, 8) as module:
        assert module.trainer.strategy.starts
        own = dict(module.network.model.named_parameters())
        assert [n for n, p in expected.items() if not torch.equal(local_shard(own[n]), part(p, own[n]))] == []


@pytest.mark.parametrize(
    "last",
    [
        lambda weight: torch.nn.init.trunc_normal_(weight[1:], std=0.02),
        lambda weight: weight.add_(1.0, alpha=2.0),
        lambda weight: torch.add(torch.ones_like(weight), 2.0, out=weight),
    ],
    ids=["rows", "option", "out"],
)
def test_what_is_not_recorded_is_not_known(last):
    def initialise(model):
        torch.nn.init.normal_(model.weight, std=1.0)
        last(model.weight)

    recorded = torch.nn.Linear(8, 8, bias=False, device="meta")
    assert recorded_starts(recorded, lambda: initialise(recorded)) == {}


def test_truncated_numbers_and_what_follows_them_are_recorded():
    def initialise(model):
        torch.nn.init.trunc_normal_(model.weight, 0.5, 2.0, -1.0, 3.0)
        with torch.no_grad():
            model.weight.mul_(0.5)

    recorded, whole = (
        torch.nn.Linear(300, 300, bias=False, device="meta"),
        torch.nn.Linear(300, 300, bias=False),
    )
    own = torch.nn.init._no_grad_trunc_normal_
    starts, found = recorded_starts(recorded, lambda: initialise(recorded)), torch.empty(300, 300)
    assert torch.nn.init._no_grad_trunc_normal_ is own
    initialise(whole)
    draw_part(found, starts["weight"], 0, "weight")
    for figure in (torch.mean, torch.std, torch.min, torch.max):  # standard errors of up to 0.002
        assert float(figure(found)) == pytest.approx(float(figure(whole.weight.detach())), abs=0.01)


def test_random_weights_are_the_models_initialisation(tmp_path):
    saved("GPT-NeoX", tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    torch.manual_seed(0)
    network = Pretrained(str(tmp_path / "m"), weights=False)
    layer = network.model.gpt_neox.layers[0].mlp.dense_h_to_4h
    assert float(layer.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert not layer.bias.detach().any()


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def pickled(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def config(**changes):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


BAD = {
    "no weights": (without_weights, "no weights as safetensors"),
    "pickles": (pickled, "no weights as safetensors"),
    "cut": (cut, "no weights as safetensors"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "does not read"),
    "unknown": (config(model_type="neox"), "does not read"),
    "own code": (config(model_type="x", auto_map={"AutoConfig": "x.X", "AutoModelForCausalLM": "x.Y"}), "does not read"),
    "no causal model": (config(model_type="vit"), "no causal model"),
    "another size": (config(hidden_size=64), "no weights as safetensors"),
    "more layers": (config(num_hidden_layers=3), "lack"),
}  # fmt: skip


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.ci] * (what == "no causal model")) for what in BAD]
)
def test_bad_folders_are_refused_in_a_line_or_two(what, tmp_path):
    saved("GPT-NeoX", tmp_path / "m")
    change, words = BAD[what]
    change(tmp_path / "m")
    with pytest.raises(ConfigError, match=words) as caught:
        Pretrained(str(tmp_path / "m"))
    assert len(str(caught.value).splitlines()) <= 2


def test_what_it_cannot_do_is_refused(tmp_path):
    saved("GPT-NeoX", tmp_path / "model")
    network = Pretrained(str(tmp_path / "model"), max_sequence_length=16)
    ids = tokens(length=16, vocab_size=64)
    with pytest.raises(ConfigError, match="mask_documents"):
        network({"input_ids": ids, "document_ids": torch.zeros_like(ids)})
    with pytest.raises(ConfigError, match="longer than max_sequence_length, 16"):
        network({"input_ids": tokens(length=17, vocab_size=64)})
    with pytest.raises(ConfigError, match="Did you mean model") as caught:
        Pretrained(str(tmp_path / "modle"))
    assert "Nothing is downloaded" in str(caught.value)


def test_a_run_trains_resumes_and_starts_from_its_weights(core, tmp_path):  # noqa: F811
    saved("GPT-NeoX", tmp_path / "m")
    values = yaml.safe_load((tmp_path / "tiny.yaml").read_text())
    values["model"]["network"] = {"class_path": "Pretrained", "init_args": {"path": "m"}}
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(values))
    whole = core("fit", "--config=tiny")
    assert whole.code == 0, whole.err
    expected = state(checkpoint(6))["state_dict"]
    checkpoint(6).unlink()
    done = core("fit", "--config=tiny", "--ckpt_path=last")
    assert done.code == 0, done.err
    found = state(checkpoint(6))["state_dict"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    done = core("export", f"--ckpt_path={checkpoint(6)}", "--output=hf")
    assert done.code == 2
    assert "Pretrained has no form in transformers: export --format torch" in done.err
