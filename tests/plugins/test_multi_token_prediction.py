"""Multi-token prediction: the loss in closed form, what each prediction sees, and its parameters on ranks and in checkpoints."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from callbacks.activation_checkpointing import ActivationCheckpointing
from conformance.runs import run
from core.errors import ConfigError
from core.technique import Declaration
from plugins.networks.bert import BERT
from plugins.networks.deepseek_v3 import DeepSeekV3
from plugins.networks.gemma3 import Gemma3
from plugins.networks.llama import Llama
from plugins.objectives.balanced_routing import BalancedRouting, routing_sums
from plugins.objectives.causal_lm import CausalLM
from plugins.objectives.multi_token_prediction import MultiTokenPrediction, labels_ahead
from plugins.objectives.prefix_lm import PrefixLM, prefixes
from tests.support.reference_models import lively
from tests.support.same_run import SAVED, TOLERANCE, differences, fit, one_process
from tests.support.small_networks import DENSE, LATENT, LENGTHS, packed
from toolkit.routing import all_routers, recorded
from toolkit.selection import Run, Selected


def prepared(network_class=Llama, arguments=DENSE, depth=2, weight=0.3):
    network = lively(network_class(**arguments)).double().train()
    objective = MultiTokenPrediction(CausalLM(), depth, weight)
    objective.change_network(network)
    lively(objective.ahead, seed=1)
    return network, objective.train()


@pytest.mark.parametrize(("network_class", "arguments"), [(Llama, DENSE), (DeepSeekV3, LATENT)])
def test_the_loss_is_the_mean_of_what_each_module_predicts_of_each_document(network_class, arguments):
    network, objective = prepared(network_class, arguments)
    batch = packed()
    batch["labels"] = batch["labels"].masked_fill(
        torch.tensor(LENGTHS).cumsum(0)[:, None].eq(torch.arange(1, 51)).any(0), -100
    )
    loss, figures = objective.loss(network, batch)
    main, counts = 0.0, [0, 0]
    further = [0.0, 0.0]
    for row in range(2):  # one document at a time, tokens by number
        for ids in batch["input_ids"][row].split(LENGTHS):
            hidden = network({"input_ids": ids[None]})
            if len(ids) > 1:
                main += F.cross_entropy(network.logits(hidden)[0, :-1].double(), ids[1:], reduction="sum")
            for k, module in enumerate(objective.ahead, start=1):
                if len(ids) <= k:
                    break
                first = hidden[:, : len(ids) - k]  # token i knows token i + k now
                embedded = network.embed_tokens(ids[k:])[None]
                x = module.projection(torch.cat((module.hidden_norm(first), module.token_norm(embedded)), -1))
                hidden = network.run_further_block(module.block, {"input_ids": ids[None, :-k]}, x)
                predicted = network.logits(module.norm(hidden))[0, :-1].double()
                further[k - 1] += (
                    F.cross_entropy(predicted, ids[k + 1 :], reduction="sum") if len(predicted) else 0.0
                )
                counts[k - 1] += len(predicted)
    assert [int(figures[f"ahead_{k}"].tokens) for k in (1, 2)] == counts
    expected = main + 0.3 / 2 * sum(further)
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)  # CausalLM's logits are float32
    assert figures["task_loss"].total.item() == pytest.approx(main.item(), rel=1e-6)
    assert objective.eval().loss(network, batch)[0].total.item() == pytest.approx(main.item(), rel=1e-6)


def test_no_module_sees_what_it_predicts():
    network, objective = prepared()
    ids = packed()["input_ids"][:1]
    for changed in (10, 30):
        other = ids.clone()
        other[0, changed:] = (ids[0, changed:] + 1) % 61
        found = []
        for tokens in (ids, other):
            calls = []
            handles = [
                module.norm.register_forward_hook(
                    lambda _, given, output, calls=calls: calls.append(output.detach())
                )
                for module in objective.ahead
            ]
            objective.loss(network, {"input_ids": tokens, "labels": tokens.roll(-1, 1)})
            found.append(calls)
            for handle in handles:
                handle.remove()
        for k, (one, two) in enumerate(zip(*found, strict=True), start=1):
            same = (one == two).all(-1)[0]
            assert same[: changed - k].all()  # position i has seen tokens up to i + k, and predicts i + k + 1
            assert not same[changed - k :].any()


def test_modules_begin_as_the_last_block_and_every_parameter_has_a_gradient():
    network = Llama(**DENSE)
    objective = MultiTokenPrediction(CausalLM(), depth=2)
    objective.change_network(network)
    width, block = 32, sum(p.numel() for p in network.blocks[-1].parameters())
    assert sum(p.numel() for p in objective.parameters()) == 2 * (block + 2 * width * width + 3 * width)
    assert all(
        torch.equal(*pair)
        for pair in zip(objective.ahead[1].block.parameters(), network.blocks[-1].parameters(), strict=True)
    )
    loss, _ = objective.loss(network, packed())
    loss.total.backward()
    assert all(p.grad is not None and p.grad.any() for p in objective.parameters())
    with pytest.raises(ConfigError, match="Gemma3 returns logits"):
        objective.change_network(
            Gemma3(**DENSE, head_dim=8, sliding_window=4, global_every=2, final_soft_cap=30.0)
        )
    encoder = BERT(61, n_layer=1, n_head=4, n_embd=32, max_sequence_length=64, intermediate_size=48)
    with pytest.raises(ConfigError, match=r"BERT returns logits, or runs no further blocks"):
        objective.change_network(encoder)
    with pytest.raises(ConfigError, match="depth=0 must be at least 1"):
        MultiTokenPrediction(CausalLM(), depth=0)


def test_a_penalty_on_weights_counts_each_of_them_once():
    network, objective = prepared()
    objective.objective = CausalLM(z_loss=0.2)
    without, _ = objective.loss(network, packed())
    objective.objective = CausalLM(z_loss=0.2, l2=0.1)
    loss, figures = objective.loss(network, packed())
    squares = [
        sum(weight.square().sum().item() for weight in part.parameters() if weight.ndim > 1)
        for part in (network, *objective.ahead)
    ]
    shares = [loss.tokens.item()] + [0.3 / 2 * figures[f"ahead_{k}"].tokens.item() for k in (1, 2)]
    expected = sum(share * 0.1 / 2 * part for share, part in zip(shares, squares, strict=True))
    assert (loss.total - without.total).item() == pytest.approx(expected, rel=1e-6)  # l2 is summed in float32


def test_flops_of_the_modules_are_those_that_torch_counts():
    network, objective = prepared(Llama, {**DENSE, "n_layer": 3})
    ids = packed()["input_ids"]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective.loss(network, {"input_ids": ids, "labels": ids.roll(-1, 1)})[0].total.backward()
    modules = objective.further_flops_per_token(network, 50)
    assert counter.get_total_flops() == 2 * 50 * (network.flops_per_token(50) + modules)
    block = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert modules == 2 * (6 * (block + 2 * 32 * 32 + 61 * 32) + 12 * 32 * 50)


@pytest.mark.parametrize(("every", "again"), [(1, [2, 2, 2, 2]), (3, [2, 1, 1, 2])])
def test_checkpointing_computes_the_modules_blocks_again(every, again):
    found = []
    for callback in (None, ActivationCheckpointing(every)):
        network, objective = prepared()
        if callback is not None:
            callback.change_network(network)
        blocks = [*network.blocks, *(module.block for module in objective.ahead)]
        calls = [0] * 4
        for index, block in enumerate(blocks):

            def count(*_, calls=calls, index=index):
                calls[index] += 1

            block.mlp.register_forward_pre_hook(count)
        objective.loss(network, packed())[0].total.backward()
        found.append([weight.grad for part in (network, objective) for weight in part.parameters()])
        assert calls == ([1] * 4 if callback is None else again)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_routers_of_the_modules_are_balanced_as_layers():
    arguments = {**LATENT, "dense_layers": 2}
    network, inner = prepared(DeepSeekV3, arguments)
    assert len(network.routers) == 1
    assert len(all_routers(network)) == 3
    loss, figures = BalancedRouting(inner, load_balancing=0.5).loss(network, packed())
    alone, _ = inner.loss(network, packed())
    assert loss.total.item() == pytest.approx(
        alone.total.item() + 0.5 * figures["load_balancing"].total.item()
    )
    with recorded(network) as routings:
        inner.loss(network, packed())
    expected, _ = routing_sums(routings, packed()["labels"] != -100, False)
    assert len(routings) == 3
    assert figures["load_balancing"].total.item() == pytest.approx(expected.item())
    (loss.total - alone.total).backward()
    assert all(module.block.mlp.router.weight.grad.any() for module in inner.ahead)


@pytest.mark.parametrize(
    ("inner", "refused"), [("BalancedRouting", True), ("PrefixLM", True), ("CausalLM", False)]
)
def test_what_listens_to_the_network_or_changes_its_batch_goes_around_it(inner, refused):
    own = Selected("model.objective", "", "", "", "", "", Declaration(""))
    objective = {"init_args": {"objective": {"class_path": f"plugins.objectives.any.{inner}"}}}
    run = Run([own], {"model": {"objective": {"class_path": "MultiTokenPrediction"} | objective}})
    said = list(MultiTokenPrediction.preflight(run, own))
    expected = "MultiTokenPrediction runs the network itself: put MultiTokenPrediction within it"
    assert [one.startswith(inner) and expected in one for one in said] == [True] * refused


@pytest.mark.parametrize(("network_class", "arguments"), [(Llama, DENSE), (DeepSeekV3, LATENT)])
def test_behind_prefixes_the_loss_is_that_of_each_document_alone(network_class, arguments):
    network, inner = prepared(network_class, arguments)
    objective, batch = PrefixLM(inner, 0.2, 0.9, seed=3).train(), packed()
    batch["labels"] = batch["labels"].masked_fill(
        torch.tensor(LENGTHS).cumsum(0)[:, None].eq(torch.arange(1, 51)).any(0), -100
    )
    loss, figures = objective.loss(network, batch)
    _, found = prefixes(batch, 0.2, 0.9, 3)
    totals, counts = [0.0, 0.0, 0.0], [0, 0, 0]
    for row in range(2):
        lengths = [int(part[0]) for part in found[row].split(LENGTHS)]
        for ids, prefix in zip(batch["input_ids"][row].split(LENGTHS), lengths, strict=True):
            one = {"input_ids": ids[None], "prefix": (torch.arange(len(ids)) < prefix)[None]}
            hidden = network(one)
            begin = max(prefix - 1, 0)  # the first position that predicts
            for k in range(min(3, len(ids))):
                if k:
                    ahead = inner.ahead[k - 1]
                    embedded = network.embed_tokens(F.pad(ids[k:], (0, k)))[None]
                    joined = torch.cat((ahead.hidden_norm(hidden), ahead.token_norm(embedded)), -1)
                    hidden = network.run_further_block(ahead.block, one, ahead.projection(joined))
                logits = network.logits(ahead.norm(hidden) if k else hidden)[0, begin : len(ids) - k - 1]
                if len(logits):
                    labels = ids[begin + k + 1 :]
                    totals[k] += F.cross_entropy(logits.double(), labels, reduction="sum").item()
                    counts[k] += len(logits)
    assert min(counts) > 20
    assert [int(loss.tokens), *(int(figures[f"ahead_{k}"].tokens) for k in (1, 2))] == counts
    assert figures["task_loss"].total.item() == pytest.approx(totals[0], rel=1e-6)
    assert loss.total.item() == pytest.approx(totals[0] + 0.3 / 2 * sum(totals[1:]), rel=1e-6)


def test_no_module_sees_what_it_predicts_behind_a_prefix():
    network, inner = prepared()
    ids, hidden = packed()["input_ids"][:1], []
    vectors = network.embed_tokens(ids).detach().requires_grad_()
    for part in (network, *inner.ahead):
        part.norm.register_forward_hook(lambda _, given, output: hidden.append(output))
    # asked for the embeddings behind 0, 1 and 2 tokens, each before the norm of that part
    network.embed_tokens.forward = lambda ids: F.pad(vectors[:, len(hidden) :], (0, 0, 0, len(hidden)))
    PrefixLM(inner, 0.5, 0.5).train().loss(network, {"input_ids": ids, "labels": ids.roll(-1, 1)})
    prefix = torch.arange(50)[None] < 25
    for k in (1, 2):
        labels = labels_ahead({"labels": torch.arange(1, 51)[None], "prefix": prefix}, k)[0]
        assert labels.tolist() == [-100] * 24 + [*range(25 + k, 51)] + [-100] * k
        for place in range(24, 50 - k - 1):
            [gradient] = torch.autograd.grad(hidden[k][0, place].square().sum(), vectors, retain_graph=True)
            assert gradient[0].abs().sum(1).nonzero().flatten().tolist() == [*range(place + k + 1)]


def test_around_prefixes_it_is_refused():
    network = Llama(**DENSE)
    objective = MultiTokenPrediction(PrefixLM(CausalLM()))
    objective.change_network(network)
    with pytest.raises(ConfigError, match="put MultiTokenPrediction within it, not around it"):
        objective.loss(network, packed())


OVERLAY = {
    "model": {
        "objective": {
            "class_path": "MultiTokenPrediction",
            "init_args": {"objective": {"class_path": "CausalLM"}, "depth": 2},
        },
    }
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "strategy",
    [{"class_path": "FSDP"}, {"class_path": "HybridParallel", "init_args": {"tensor": 2}}],
    ids=str,
)
def test_modules_train_on_ranks_as_in_one_process_and_are_in_the_checkpoint(strategy):
    expected = one_process(OVERLAY)
    weights = expected.checkpoint()["state_dict"]
    names = [name for name in weights if name.startswith("objective.ahead.1.")]
    assert "objective.ahead.1.projection.weight" in names
    found = fit({**OVERLAY, "trainer": {"strategy": strategy}}, 2)
    apart = differences(found, expected)
    assert max(apart.values()) < TOLERANCE, apart
    output = expected.folder / f"exported-{strategy['class_path']}"
    path = expected.folder / "checkpoints" / f"step-{SAVED}.ckpt"
    done = run(["export", f"--ckpt_path={path}", f"--output={output}"], expected.folder)
    assert done.code == 0, done.error_text
    exported = load_file(output / "model.safetensors")
    assert len(exported) > 10
    assert not [name for name in exported if "ahead" in name or "objective" in name]
