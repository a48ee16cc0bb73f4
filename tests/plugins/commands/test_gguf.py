"""GGUF in and out: llama.cpp computes the same, the weights come back, and what has no form is refused."""

import json
import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from core.__main__ import main
from core.errors import ConfigError
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from plugins.checkpoints.gguf_families import FAMILIES, GPT2
from plugins.checkpoints.initial_weights import InitialWeights
from plugins.checkpoints.matching import open_own
from plugins.networks.gemma3 import Gemma3
from plugins.networks.gpt import GPT
from plugins.networks.llama import Llama
from plugins.networks.mistral import Mistral
from plugins.networks.mixtral import Mixtral
from plugins.networks.olmo2 import OLMo2
from plugins.networks.olmoe import OLMoE
from plugins.networks.qwen2 import Qwen2
from plugins.networks.qwen3 import Qwen3
from plugins.networks.qwen3_moe import Qwen3MoE
from tests.support.cli_runs import core  # noqa: F401
from tests.support.gguf_metadata import file_of
from tests.support.llama_cpp import LlamaCpp, token_ids
from tests.support.reference_models import tokens
from tests.support.stored_networks import MLP, PLAIN, ROTARY, SMALL, lively_network, store, tokenizer_json
from toolkit.gguf_files import read_gguf
from toolkit.gguf_tokenizers import SPLITS, _beginning, _described, from_metadata, to_metadata

WIDE = {**MLP, "n_embd": 64}
ODD = {**WIDE, "intermediate_size": 80}
MOE = {**WIDE, "n_experts": 4, "experts_per_token": 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BIASES = {"bias": True, "tie_embeddings": False}

NETWORKS = {
    "GPT": (GPT, {**PLAIN, "n_embd": 64}),
    "GPT-as-Llama": (GPT, {**SMALL, **ROTARY, **BIASES, "n_embd": 64}),
    "Llama-llama3": (Llama, {**WIDE, **BIASES, "rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "Llama-yarn": (Llama, {**WIDE, "rope_scaling": YARN}),
    "Llama-linear": (Llama, {**WIDE, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "Mistral": (Mistral, {**WIDE, "sliding_window": None}),
    "Mixtral": (Mixtral, MOE),
    "OLMo2": (OLMo2, WIDE),
    "OLMoE": (OLMoE, {**MOE, "n_kv_head": 4}),
    "Qwen2": (Qwen2, WIDE),
    "Qwen3": (Qwen3, {**WIDE, "head_dim": 12}),
    "Qwen3MoE": (Qwen3MoE, {**MOE, "head_dim": 12}),
    "Gemma3": (Gemma3, {**WIDE, "n_layer": 6, "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 8}),
}  # fmt: skip
FAST = ("GPT", "Llama-llama3", "Mixtral")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.ci) for name in NETWORKS]
)
def test_llama_cpp_computes_the_same_and_the_weights_come_back(name, core, tmp_path):  # noqa: F811
    """1e-4 is what the order of sums makes; llama.cpp computes GELU from a table of float16."""
    network_class, arguments = NETWORKS[name]
    network = lively_network(network_class, arguments)
    store(network, arguments, tmp_path / "a.ckpt")
    done = core("export", "--ckpt_path=a.ckpt", "--format=gguf", "--type=f32", "--output=a.gguf")
    assert done.code == 0, done.err

    ids = tokens(1, 40, vocab_size=55)
    with torch.no_grad():
        ours = torch.log_softmax(network.logits(network({"input_ids": ids})), dim=-1)[0]
    theirs = LlamaCpp(tmp_path / "a.gguf")
    for place in (5, 23, 40):
        found = theirs.log_probabilities(ids[0, :place].tolist(), 61)
        apart = max(abs(value - float(ours[place - 1, number])) for number, value in found.items())
        assert apart < (1e-4 if name not in ("GPT", "Gemma3") else 0.02)

    assert core("import", "a.gguf", "--output=b.ckpt").code == 0
    back, own = open_own(tmp_path / "b.ckpt"), network.state_dict()
    assert back.keys() == own.keys()
    for key, value in own.items():  # 1 is added to Gemma's norms
        torch.testing.assert_close(back[key].read(), value, rtol=0, atol=1e-6 if name == "Gemma3" else 0)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.architecture)
def test_names_are_those_of_ggufs_own_table(family):
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == family.name]
    table = gguf.get_tensor_name_map(number, 3)
    found = {}
    for ours, theirs in family.names.items():
        one = theirs.replace("*", "1", 1).replace("experts.*.", "experts.")
        if name := table.get_name(one):
            found[ours.replace("*", "1")] = name
    assert all(ours == name for ours, name in found.items())
    assert len(found) >= (len(GPT2) if family.transposed else 12)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A Llama, and a.gguf in q8_0 from its sharded checkpoint."""
    folder = tmp_path_factory.mktemp("written")
    network = lively_network(Llama, ODD)
    store(network, ODD, folder / "a.ckpt", sharded=True)
    options = (f"--ckpt_path={folder}/a.ckpt", "--format=gguf", "--type=q8_0", f"--output={folder}/a.gguf")
    assert main(["export", *options]) == 0
    return network, folder / "a.gguf"


@pytest.fixture
def exported(written, tmp_path):
    """The network; a copy of its file is in the folder."""
    shutil.copy(written[1], tmp_path)
    return written[0]


def test_quantised_weights_are_ggufs_own_and_a_run_starts_from_them(exported, tmp_path):
    kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert kinds["blk.0.attn_q.weight"] == kinds["token_embd.weight"] == "Q8_0"
    assert kinds["output_norm.weight"] == "F32"
    assert kinds["blk.0.ffn_down.weight"] == "F16"  # 80 columns are not a multiple of 32

    network = Llama(**ODD)
    InitialWeights(str(tmp_path / "a.gguf")).change_network(network)
    for (name, value), own in zip(exported.state_dict().items(), network.state_dict().values(), strict=True):
        if value.ndim == 1:
            assert torch.equal(own, value)
        elif name.endswith("down_proj.weight"):
            assert torch.equal(own, value.half().float())
        else:  # a block of 32 has steps of a 127th of its largest value; their size is a float16
            blocks = value.reshape(-1, 32)
            step = blocks.abs().amax(dim=1, keepdim=True) / 127
            assert ((own.reshape(-1, 32) - blocks).abs() <= (0.5 + 127 * 2**-11) * step).all()


def test_the_tokenizer_and_what_ends_a_text_come_back(exported, core, tmp_path):  # noqa: F811
    assert core("import", "a.gguf", "--output=b.ckpt").code == 0
    assert core("export", "--ckpt_path=b.ckpt", "--output=hf").code == 0
    found = Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    before = Tokenizer.from_str(tokenizer_json())
    assert found.encode("Some other words").ids == before.encode("Some other words").ids
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {"eos_token_id": 0}
    tokenizer = PretrainedTokenizer(str(tmp_path / "a.gguf"))
    assert (tokenizer.end_of_text_id, tokenizer.vocab_size) == (0, 55)
    assert tokenizer.encode_batch(["The other"]) == [before.encode("The other").ids]


# -- files in parts ----------------------------------------------------------------------------------------------


@pytest.fixture
def parts(exported, tmp_path):
    """The file in three parts, as the writer of `gguf` makes them; returns their paths."""
    whole = gguf.GGUFReader(tmp_path / "a.gguf")
    writer = GGUFWriter(tmp_path / "parts" / "b.gguf", "llama", split_max_tensors=11)
    for key, value in read_gguf(tmp_path / "a.gguf").metadata.items():
        field = whole.fields[key].types
        if key != "general.architecture":
            writer.add_key_value(key, value, field[0], field[1] if len(field) > 1 else None)
    for tensor in whole.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    (tmp_path / "parts").mkdir()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = sorted((tmp_path / "parts").iterdir())
    assert [path.name for path in found] == [f"b-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
    return found


def test_parts_are_one_file_whichever_is_named(parts, core, tmp_path):  # noqa: F811
    whole = read_gguf(tmp_path / "a.gguf")
    for path in (parts[0], parts[2]):
        found = read_gguf(path)
        assert whole.metadata.items() <= found.metadata.items()
        assert found.tensors.keys() == whole.tensors.keys()
        assert all(torch.equal(found.tensors[name].read(), one.read()) for name, one in whole.tensors.items())
    assert torch.equal(found.rows["blk.2.attn_q.weight"](5), whole.rows["blk.2.attn_q.weight"](5))
    assert core("import", str(parts[1]), "--output=b.ckpt").code == 0
    done = core("import", str(parts[1]), "--output=c.ckpt", "--check")
    assert (done.code, (tmp_path / "c.ckpt").exists()) == (2, False)
    assert "transformers, which reads no GGUF file in parts" in done.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda parts: parts[1].unlink(), "b-00002-of-00003.gguf is missing: b-00001-of-00003.gguf is one of 3 parts"),
        (lambda parts: shutil.copy(parts[1], parts[2]), "b-00003-of-00003.gguf says that it is part 1 of 3"),
        (lambda parts: parts[0].rename(parts[0].with_name("c.gguf")), "would have to end in -00001-of-00003.gguf"),
        (lambda parts: cut(parts[2]), "b-00003-of-00003.gguf is cut off"),
    ],
    ids=["missing", "twice", "name", "cut"],
)  # fmt: skip
def test_parts_that_are_none_are_named(change, words, parts, core):  # noqa: F811
    change(parts)
    [first] = [path for path in parts[0].parent.iterdir() if path.name in ("c.gguf", parts[0].name)]
    done = core("import", str(first), "--output=b.ckpt")
    assert done.code == 2, done.out
    assert words in done.err
    assert len(done.err.splitlines()) == 1


# -- tokenizers --------------------------------------------------------------------------------------------------

TEXTS = [
    "It's 1234567 o'clock, isn't IT?  Two  spaces\n\n\tand a tab\r\n",
    "naïve café — 東京 ٣٤ ½ Ünï İ'S x=3.14;y+=2",
    "a<|end|>b" + "-" * 300 + " " * 300 + "z",
]


def bpe(split):
    """Returns a tokenizer.json of a small vocabulary, split in a known way."""
    described = {"version": "1.0", **_described(split, split == "llama-bpe", [("a", 1)], [])}
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    shell = Tokenizer.from_str(json.dumps(described))
    tokenizer.pre_tokenizer, tokenizer.decoder = shell.pre_tokenizer, decoders.ByteLevel()
    if shell.normalizer is not None:
        tokenizer.normalizer = shell.normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    return tokenizer.to_str()


@pytest.mark.parametrize("split", SPLITS)
def test_a_tokenizer_comes_back_and_its_split_has_the_right_name(split, tmp_path):
    before = bpe(split)
    metadata = to_metadata(before, 410, {"eos": 0})
    assert metadata["tokenizer.ggml.pre"] == split
    found = Tokenizer.from_str(from_metadata(file_of(metadata, tmp_path / "a.gguf")))
    own = Tokenizer.from_str(before)
    for text in TEXTS:
        assert found.encode(text).ids == own.encode(text).ids
    assert found.get_vocab() == own.get_vocab()


def test_what_texts_begin_with_comes_back(tmp_path):
    """A file of Llama 3 that does not say so begins texts with BOS, too, as llama.cpp does."""
    found = json.loads(bpe("llama-bpe"))
    assert to_metadata(json.dumps(found), 410, {"bos": 0})["tokenizer.ggml.add_bos_token"] is False
    found["post_processor"] = _beginning(0, "<|end|>")
    metadata = to_metadata(json.dumps(found), 410, {})
    assert (metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.bos_token_id"]) == (True, 0)
    for number in range(2):
        back = Tokenizer.from_str(from_metadata(file_of(metadata, tmp_path / f"{number}.gguf")))
        assert back.encode("It's").ids == [0, *Tokenizer.from_str(json.dumps(found)).encode("It's").ids[1:]]
        metadata.pop("tokenizer.ggml.add_bos_token", None)


@pytest.mark.ci
@pytest.mark.parametrize("split", SPLITS)
def test_llama_cpp_encodes_texts_to_the_same_ids(split, core, tmp_path):  # noqa: F811
    arguments = {**WIDE, "vocab_size": 410}
    store(lively_network(Llama, arguments), arguments, tmp_path / "a.ckpt", tokenizer=bpe(split))
    assert core("export", "--ckpt_path=a.ckpt", "--format=gguf", "--output=a.gguf").code == 0
    own = Tokenizer.from_str(bpe(split))
    own.encode_special_tokens = True
    assert token_ids(tmp_path / "a.gguf", TEXTS) == [own.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["model"].update(type="WordPiece"), "The tokenizer is WordPiece"),
        (lambda t: t.update(decoder=None), "BPE with the decoder None"),
        (lambda t: t.update(normalizer={"type": "Lowercase"}), "after Lowercase"),
        (lambda t: t.update(pre_tokenizer={"type": "Whitespace"}), "Whitespace"),
        (lambda t: t["pre_tokenizer"].update(add_prefix_space=True), "no name for how the tokenizer splits"),
        (lambda t: t["model"].update(merges=[]), "no merges"),
        (lambda t: t["added_tokens"][0].update(id=61), "has 62 tokens, the network 61 rows"),
    ],
    ids=["wordpiece", "decoder", "normalizer", "split", "space", "merges", "rows"],
)
def test_tokenizers_without_a_form_are_refused(change, words):
    found = json.loads(tokenizer_json())
    change(found)
    with pytest.raises(ConfigError) as caught:
        to_metadata(json.dumps(found), 61, {})
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 2


# -- bad input ---------------------------------------------------------------------------------------------------


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def short(path):
    path.write_bytes(path.read_bytes()[:500])


def replaced(old, new):
    def change(path):
        content = path.read_bytes()
        assert content.count(old) >= 1
        path.write_bytes(content.replace(old, new, 1))

    return change


def typed(number):
    """Gives a tensor another type: after its name, one dimension of 64."""
    name = b"output_norm.weight" + struct.pack("<IQ", 1, 64)
    return replaced(name + struct.pack("<I", 0), name + struct.pack("<I", number))


def many(place):
    def change(path):
        content = bytearray(path.read_bytes())
        content[place : place + 8] = struct.pack("<Q", 1 << 60)
        path.write_bytes(content)

    return change


def again(path):
    """Gives it a key that it has already."""
    content = bytearray(path.read_bytes())
    content[16:24] = struct.pack("<Q", struct.unpack("<Q", content[16:24])[0] + 1)
    name = b"general.architecture"
    content[24:24] = struct.pack("<Q", len(name)) + name + struct.pack("<IQ", 8, 4) + b"gpt2"
    path.write_bytes(content)


BAD = {
    "key twice": (again, "it has general.architecture twice"),
    "empty tensor": (replaced(b"output_norm.weight" + struct.pack("<IQ", 1, 64), b"output_norm.weight" + struct.pack("<IQ", 1, 0)), "output_norm.weight has a dimension of 0"),
    "cut": (cut, "is cut off"),
    "short": (short, "is cut off"),
    "no GGUF": (lambda path: path.write_bytes(b"GGML" + bytes(100)), "does not begin with the letters GGUF"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as GGUF"),
    "other bytes": (replaced(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"), "2 and 3 in little-endian order"),
    "many tensors": (many(8), "is cut off"),
    "many keys": (many(16), "is cut off"),
    "type": (typed(19), "output_norm.weight is of type IQ1_S"),
    "unknown type": (typed(999), "is of type number 999"),
    "architecture": (replaced(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba"), "for the architecture 'mamba'"),
    "split": (replaced(b"\5\0\0\0\0\0\0\0gpt-2", b"\5\0\0\0\0\0\0\0tekkn"), "splits text as 'tekkn' does"),
    "tokenizer": (replaced(b"\4\0\0\0\0\0\0\0gpt2", b"\4\0\0\0\0\0\0\0bert"), "a tokenizer of the kind 'bert'"),
    "another name": (replaced(b"blk.1.ffn_up", b"blk.1.ffn_xx"), "blk.1.ffn_xx.weight, which llama has no place for"),
    "another layer": (replaced(b"blk.2.ffn_up", b"blk.7.ffn_up"), "has no model.layers.2.mlp.up_proj.weight"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_files_are_refused_in_a_line_or_two(what, exported, core, tmp_path):  # noqa: F811
    change, words = BAD[what]
    change(tmp_path / "a.gguf")
    before = sorted(tmp_path.rglob("*"))
    done = core("import", "a.gguf", "--output=b.ckpt")
    assert done.code == 2, done.out
    assert words in done.err
    assert len(done.err.splitlines()) <= 2
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("network_class", "arguments", "options", "words"),
    [
        (GPT, {**PLAIN, "activation": "gelu"}, "--output=a.gguf", "activation='gelu' has no form in GGUF's gpt2"),
        (Mistral, {**MLP, "sliding_window": 8}, "--output=a.gguf", "sliding_window=8 has no form in GGUF's llama"),
        (OLMoE, {**MOE}, "--output=a.gguf", "n_kv_head=2 has no form in GGUF's olmoe"),
        (Llama, MLP, "--output=a", "belong together"),
        (Llama, MLP, "--output=a.gguf --type=q3_k", "q3_k"),
    ],
    ids=["activation", "window", "groups", "name", "type"],
)  # fmt: skip
def test_what_has_no_form_is_refused(network_class, arguments, options, words, core, tmp_path):  # noqa: F811
    store(lively_network(network_class, arguments), arguments, tmp_path / "a.ckpt")
    done = core("export", "--ckpt_path=a.ckpt", "--format=gguf", *options.split())
    assert done.code == 2
    assert words in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "tiny.yaml"]


def test_every_type_that_is_read_is_dequantised_as_gguf_does(tmp_path):
    """Of types that `gguf` cannot write, from random bytes; NaN where these are no number."""
    from toolkit.gguf_files import QUANTISED

    writer, random = GGUFWriter(tmp_path / "a.gguf", "llama"), np.random.default_rng(0)
    stored = {}
    for name in QUANTISED:
        kind = GGMLQuantizationType[name]
        block, width = gguf.GGML_QUANT_SIZES[kind]
        stored[name] = random.integers(0, 255, (3, 512 // block * width), dtype=np.uint8)
        writer.add_tensor(name, stored[name], raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "a.gguf")
    with np.errstate(all="ignore"):
        for name, content in stored.items():
            expected = gguf.dequantize(content, GGMLQuantizationType[name])
            np.testing.assert_array_equal(file.tensors[name].read().numpy(), expected)
            np.testing.assert_array_equal(file.rows[name](1).numpy(), expected[1])
