"""Networks of ours beside the models of transformers that have the same weights."""

from __future__ import annotations

from pkgutil import resolve_name

import torch

from tests.support.sparse_models import published


def lively(network, seed=0):
    """Replaces the small initial weights by ones that make attention and activations far from linear."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            embedding = any(word in name for word in ("embed", "wte", "wpe"))
            parameter.normal_(std=0.3 if embedding else 0.15, generator=generator)
            if parameter.ndim == 1 and name.endswith("weight"):  # a norm's
                parameter.add_(1)
    return network.eval()


def tokens(batch_size=2, length=50, vocab_size=61, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch_size, length), generator=generator)


def reference_of(network_class, arguments):
    """Returns transformers' model with random weights, for the arguments of a network of ours."""
    import transformers

    # no rows of padding: they would have no gradient
    own = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    values = own | network_class.hugging_face.config(network_class, arguments)
    [architecture] = values.pop("architectures")
    config = transformers.CONFIG_MAPPING[values.pop("model_type")](**values)
    torch.manual_seed(0)
    return lively(resolve_name(f"transformers.{architecture}")(config))


def renamed(network, theirs):
    """Returns tensors of ours from a mapping of theirs; each of theirs is used once, a tied head aside."""
    theirs = published(theirs, mixtral=network.hugging_face.model_type == "mixtral")
    ours, used = {}, set()
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    for stored in network.hugging_face.tensors(shapes):
        pieces = stored.to_ours(theirs[stored.theirs], [shapes[name][0] for name in stored.ours])
        if stored.index is None:
            ours |= dict(zip(stored.ours, pieces, strict=True))
        else:
            ours.setdefault(stored.ours[0], []).append(pieces[0])
        used.add(stored.theirs)
    assert set(theirs) - used <= set(network.hugging_face.copies)
    assert ("lm_head.weight" in used) == (getattr(network, "lm_head", None) is not None)
    return {name: torch.stack(found) if isinstance(found, list) else found for name, found in ours.items()}


def both(network_class, arguments):
    """Returns a network of ours and transformers' model, with the same weights, in eval mode."""
    reference, network = reference_of(network_class, arguments), network_class(**arguments).eval()
    network.load_state_dict(renamed(network, reference.state_dict()))
    return network, reference


def blocks_of(reference):
    base = reference.base_model
    if hasattr(base, "decoder"):  # T5
        return [*base.encoder.block, *base.decoder.block]
    if hasattr(base, "encoder"):
        return base.encoder.layer
    return base.layers if hasattr(base, "layers") else base.h


def hidden_states(blocks, call):
    """Returns what each block gives while `call()` runs, and what that returns."""
    found = []

    def keep(module, arguments, output):
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [block.register_forward_hook(keep) for block in blocks]
    result = call()
    for handle in handles:
        handle.remove()
    return [*found, result]
