"""VLLMSampler's calls, by a stand-in for vLLM whose networks are those of transformers: vLLM itself needs a GPU."""

import importlib.util
import json
import statistics
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from callbacks.rollouts import Rollouts
from core.errors import ConfigError
from datamodules.prompt_datamodule import PromptDataModule
from plugins.adapters.ia3 import IA3
from plugins.adapters.lora import LoRA
from plugins.cli.selection import describe
from plugins.networks.llama import Llama
from plugins.objectives.grpo import GRPO
from plugins.precision.bitsandbytes_weights import BitsandbytesWeights
from plugins.samplers.vllm_sampler import VLLMSampler
from tests.conftest import HOUSE
from tests.support import rewarded, tuning_files
from tests.support.chat_checkpoint import SIZES
from tests.support.records import build
from tests.support.tiny_training import module, trainer
from toolkit.selection import Run


class SamplingParams(SimpleNamespace):
    """Keeps what it is given, as vLLM's."""


class LLM:
    """Calls and results of `vllm.LLM`, one sequence at a time."""

    def __init__(self, model, max_model_len, **options):
        from transformers import AutoModelForCausalLM

        assert options["distributed_executor_backend"] == "external_launcher"
        self.network = AutoModelForCausalLM.from_pretrained(model, dtype=options["dtype"]).eval()
        self.longest, self.cache_is_empty = max_model_len, True

    def collective_rpc(self, method, args=()):
        self.cache_is_empty = False
        model = SimpleNamespace(load_weights=self.load_weights)
        return [method(SimpleNamespace(model_runner=SimpleNamespace(model=model)), *args)]

    @torch.no_grad()
    def load_weights(self, weights):
        assert not torch.is_autocast_enabled("cpu")
        own = dict(self.network.named_parameters())
        for name, value in weights:  # once, as vLLM reads them from files: they may be made meanwhile
            own.pop(name).copy_(value)
        assert not own

    def reset_prefix_cache(self):
        self.cache_is_empty = True

    def generate(self, prompts, sampling_params, use_tqdm):
        assert self.cache_is_empty
        pairs = zip(prompts, sampling_params, strict=True)
        return [SimpleNamespace(outputs=[self.completion(p["prompt_token_ids"], s)]) for p, s in pairs]

    @torch.no_grad()
    def completion(self, prompt, params):
        assert params.ignore_eos
        random, ids, logs = torch.Generator().manual_seed(params.seed), [], []
        while len(ids) < min(params.max_tokens, self.longest - len(prompt)):
            logits = self.network(input_ids=torch.tensor([[*prompt, *ids]])).logits[0, -1]
            chances = logits.log_softmax(-1)
            id = int(torch.multinomial(chances.exp(), 1, generator=random))
            ids.append(id)
            logs.append({id: SimpleNamespace(logprob=float(chances[id]), rank=1)})
            if id in params.stop_token_ids:
                break
        return SimpleNamespace(token_ids=tuple(ids), logprobs=logs)


@pytest.fixture
def vllm(monkeypatch):
    stand_in = ModuleType("vllm")
    stand_in.LLM, stand_in.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", stand_in)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv(name, "1")  # so that what the sampler sets is removed after the test
        monkeypatch.delenv(name)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("callbacks", "options", "near", "kl"),
    [
        ([], {}, 1e-5, 0.01),  # two implementations in float32
        ([LoRA(rank=2)], {}, 1e-5, 0.01),
        (
            [LoRA(rank=2, layers=["*.q_proj", "*.down_proj"])],
            {"plugins": [BitsandbytesWeights(compute_dtype="float32")]},
            1e-5,
            0.0,
        ),
        ([LoRA(rank=2)], {"precision": "bf16-mixed"}, 2**-8, 0.01),  # the trainer rounds
    ],
    ids=["full", "LoRA", "QLoRA", "bf16-mixed"],
)
def test_the_engine_has_the_weights_of_now_in_each_rollout(callbacks, options, near, kl, vllm, tmp_path):
    tuning_files.base_folder(tmp_path)
    sampler = VLLMSampler(str(tmp_path / tuning_files.BASE), dtype="float32")
    data = build(
        PromptDataModule, tmp_path, rewarded.prompts(), template="plain", sequence_length=16, batch_size=4
    )
    torch.manual_seed(0)
    trained = module(
        lambda: Llama(**SIZES, max_sequence_length=64),
        objective=GRPO(kl=kl),
        optimizer=lambda groups: torch.optim.Adam(groups, lr=5e-2),
    )
    rollouts = Rollouts(rewarded.LowTokens(), samples=4, max_new_tokens=8, sampler=sampler)
    figures = rewarded.Figures()
    options = {**options, "max_steps": 8, "limit_val_batches": 0}
    trainer(tmp_path, callbacks=[*callbacks, rollouts, figures], **options).fit(trained, datamodule=data)
    gaps = [one["rollout/gap"] for one in figures.figures]
    # an engine with the first weights would be as far away as the reference, or farther
    assert len(gaps) == 8
    assert max(gaps) < near
    # of 16 answers, so that a single one may be near 0; the first rollout is the reference's own
    assert not kl or statistics.mean(abs(one["rollout/kl"]) for one in figures.figures[1:]) > 1e-2


def test_a_folder_of_another_network_is_refused(vllm, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json in .*\n.*export"):
        VLLMSampler(str(tmp_path))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 999}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    network = Llama(**SIZES, max_sequence_length=64)
    options = {"max_new_tokens": 4, "seeds": [0], "stop_ids": [0]}
    with pytest.raises(ConfigError, match=r"vocab_size of 999, the network one of 320"):
        VLLMSampler(str(tmp_path)).sample(network, [[1]], **options)
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Other"]}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"is of \['Other'\], which Llama is not"):
        VLLMSampler(str(tmp_path)).sample(network, [[1]], **options)


def test_adapters_that_are_no_weights_and_shared_weights_are_refused_before_the_run():
    own = describe("trainer.callbacks.0.init_args.sampler", VLLMSampler, "x.VLLMSampler", {})
    lora, ia3 = (
        describe("trainer.callbacks.1", kind, f"{kind.__module__}.{kind.__name__}", {})
        for kind in (LoRA, IA3)
    )
    assert not list(VLLMSampler.preflight(Run((own, lora)), own))
    [said] = VLLMSampler.preflight(Run((own, lora, ia3)), own)
    assert "take LoRA for IA3" in said


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_check_says_how_to_install_it(capsys):
    from core.__main__ import main

    overlay = HOUSE / "configs" / "techniques" / "vllm_sampler.yaml"
    assert main(["check", "--offline", "--config", "quickstart", "--config", str(overlay)]) == 2
    said = capsys.readouterr().err
    assert "vllm is not installed: pip install 'leyden[vllm]'" in said
    assert len(said.splitlines()) <= 10
