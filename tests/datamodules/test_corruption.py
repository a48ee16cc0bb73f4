"""Masks and spans: their shares, what is never changed, what a row depends on; the spans of T5's definition."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from core.errors import ConfigError
from datamodules.corruption.masking import Masking
from datamodules.corruption.spans import Spans
from datamodules.corruption.vocabulary import Vocabulary, read_vocabulary
from datamodules.masked_datamodule import MaskedDataModule
from datamodules.packing.best_fit import BestFit
from datamodules.packing.concatenate import Concatenate
from datamodules.packing.padded_documents import PaddedDocuments
from datamodules.preparation.readers.text_documents import TextDocuments
from datamodules.preparation.tokenizers.pretrained_tokenizer import PretrainedTokenizer
from datamodules.preparation.writers.token_shards import TokenShards
from datamodules.span_corruption_datamodule import SpanCorruptionDataModule
from toolkit.label_positions import LABEL_POSITIONS

TEXT = [
    "the masked tokens of unmasked words, and of others; 1999 words (or more) were tokenised here.",
    "tokenisation of words: masking, unmasking and remasking. The end of the text",
] * 8
SIZE, SPECIAL = 50, 5
"""Ids of a vocabulary without words, of which the first are special."""


def plain(words=None):
    special = np.arange(SIZE) < SPECIAL
    none = np.zeros(SIZE, bool)
    return Vocabulary({"[MASK]": 4}, special, none if words is None else words, ~special)


def rng(seed=0):
    return np.random.default_rng(seed)


def within(count, trials, share):
    """Whether a count is one of a binomial distribution, but for 1 in 150,000."""
    return abs(count - trials * share) < 4.5 * math.sqrt(trials * share * (1 - share))


def test_shares_are_those_of_the_paper():
    ids = rng(1).integers(0, SIZE, 400_000)
    masking = Masking(plain(), 4, 0.15, 0.8, 0.1, whole_words=False)
    inputs, labels = masking.masks(ids, rng())
    chosen = labels != -100
    maskable, count = int((ids >= SPECIAL).sum()), int(chosen.sum())
    assert within(count, maskable, 0.15)
    assert within(int((inputs[chosen] == 4).sum()), count, 0.8)
    others = SIZE - SPECIAL
    assert within(int((inputs[chosen] == ids[chosen]).sum()), count, 0.1 + 0.1 / others)
    swapped = inputs[chosen & (inputs != 4) & (inputs != ids)]
    assert within(len(swapped), count, 0.1 * (1 - 1 / others))
    assert all(
        within(int((swapped == token).sum()), len(swapped), 1 / others) for token in range(SPECIAL, SIZE)
    )
    assert (labels[chosen] == ids[chosen]).all()
    assert (inputs[~chosen] == ids[~chosen]).all()
    assert not chosen[ids < SPECIAL].any()
    pairs = chosen[1:] & chosen[:-1] & (ids[1:] >= SPECIAL) & (ids[:-1] >= SPECIAL)
    assert within(int(pairs.sum()), maskable * maskable // len(ids), 0.15**2)  # each by itself


def test_all_pieces_of_a_word_are_chosen_together_and_as_often():
    pieces = np.arange(SIZE) >= 20  # they continue a word
    masking = Masking(plain(pieces), 4, 0.15, 0.8, 0.1, whole_words=True)
    ids = rng(1).integers(SPECIAL, SIZE, 400_000)
    chosen = masking.masks(ids, rng())[1] != -100
    words = np.cumsum(ids < 20)
    first = np.flatnonzero(np.diff(words, prepend=-1))
    assert (chosen == np.repeat(chosen[first], np.diff([*first, len(ids)]))).all()
    assert within(int(chosen[first].sum()), len(first), 0.15)
    # the variance of the tokens is that of words of geometric length with mean 3: 15 squared tokens a word
    assert abs(chosen.mean() - 0.15) < 4.5 * math.sqrt(0.15 * 0.85 * 15 * len(first)) / len(ids)


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        TEXT, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"special_tokens": ["<s>", "</s>", "<mask>"], "show_progress": False}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=310, initial_alphabet=alphabet, **options)
    )
    return tokenizer


@pytest.mark.parametrize("tokenizer", [word_piece, byte_level])
def test_words_are_those_of_the_tokenizer(tokenizer):
    tokenizer = tokenizer()
    vocabulary = read_vocabulary(tokenizer.to_str(), 3)
    for text in [*TEXT[:2], "naïve über 漢字 größer", "zażółć gęślą"]:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        unknown = encoding.tokens.count("[UNK]")
        expected = np.cumsum(np.diff(np.array(encoding.word_ids), prepend=0) != 0)
        assert unknown or (vocabulary.words(np.array(encoding.ids)) == expected).all(), encoding.tokens
    assert len(set(vocabulary.words(np.array(tokenizer.encode("unmasked tokenisation").ids)))) == 2


# -- rows ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A text, and a tokenizer of BERT's kind."""
    folder = tmp_path_factory.mktemp("corrupted")
    for number in range(40):
        words = " ".join(TEXT[number % 2].split()[: 3 + number % 11])
        (folder / f"{number}.txt").write_text(f"{words} {number}.")
    for name, tokenizer in (("bert", word_piece()), ("bytes", byte_level())):
        (folder / name).mkdir()
        tokenizer.save(str(folder / name / "tokenizer.json"))
    return folder


def build(kind, source, tokenizer="bert", packing=None, **options):
    options = {"sequence_length": 16, "batch_size": 4, "cache_dir": str(source / "cache")} | options
    read = PretrainedTokenizer(str(source / tokenizer / "tokenizer.json"))
    data = kind(
        TextDocuments, read, TokenShards(), packing or Concatenate(), source=str(source / "*.txt"), **options
    )
    data.setup()
    return data


def train(data, count, cursor=None, **order):
    """Returns the next batches and the cursor after them."""
    options = {"sequence_length": data.sequence_length, "batch_size": data.batch_size, "seed": data.seed}
    batches = data.packed("train", **options | {"shuffle": True} | order)
    batches.cursor = cursor or batches.cursor
    found = []
    for cursor, batch in batches:
        found.append(batch)
        if len(found) == count:
            return found, cursor
    return found, cursor


def joined(batches):
    """Returns the rows of batches, without where their labels are, which follows from the labels and may be wider."""
    names = batches[0].keys() - {LABEL_POSITIONS}
    return {name: torch.cat([batch[name] for batch in batches]) for name in names}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def restored(batch):
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


KINDS = {
    "masks": lambda source, **options: build(MaskedDataModule, source, **options),
    "spans": lambda source, **options: build(
        SpanCorruptionDataModule, source, extra_ids=20, mean_span_length=1.0, **options
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_after_a_resume_and_on_other_ranks(kind, source):
    data = KINDS[kind](source)
    whole, _ = train(data, 12)
    first, cursor = train(data, 5)
    rest, _ = train(data, 7, json.loads(json.dumps(cursor)))
    assert same(joined(whole), joined([*first, *rest]))
    ranks = [train(data, 12, batch_size=2, world_size=2, rank=rank)[0] for rank in range(2)]
    assert same(joined(whole), joined([part for pair in zip(*ranks, strict=True) for part in pair]))
    other = KINDS[kind](source, seed=1)
    assert not torch.equal(
        joined(train(other, 12, shuffle=False)[0])["labels"],
        joined(train(data, 12, shuffle=False)[0])["labels"],
    )


def test_masks_are_new_in_each_epoch_and_fixed_in_validation(source):
    data = build(MaskedDataModule, source, batch_size=1, mask_share=0.4, shuffle=False)
    stored = data.packed("train", sequence_length=16, batch_size=1).parts
    count = 2 * stored.tokens  # batches of 14 tokens each: in 28 epochs each row begins at each place
    seen = {}
    for batch in train(data, count, shuffle=False)[0]:
        row = tuple(restored(batch)[0].tolist())
        seen.setdefault(row, []).append(tuple(batch["labels"][0].tolist()))
    again = [masks for masks in seen.values() if len(masks) > 1]
    assert len(again) > 100
    assert sum(len(set(masks)) for masks in again) > 0.9 * sum(map(len, again))
    first, second = (joined(list(data.val_dataloader())) for _ in range(2))
    assert same(first, second)
    reseeded = build(MaskedDataModule, source, batch_size=1, mask_share=0.4, seed=9)
    assert same(first, joined(list(reseeded.val_dataloader())))


def test_rows_begin_and_end_as_bert_expects_it(source):
    data = build(MaskedDataModule, source)
    assert data.end_of_text_id == 3
    [batch], _ = train(data, 1)
    assert batch["input_ids"].shape == (4, 16)
    assert (batch["input_ids"][:, 0] == 2).all()
    assert (batch["input_ids"][:, -1] == 3).all()
    assert (batch["labels"][:, [0, -1]] == -100).all()
    assert set(batch) == {"input_ids", "labels", LABEL_POSITIONS}


def test_a_batch_says_where_its_labels_are_and_most_have_the_same_shape(source):
    data = build(MaskedDataModule, source, sequence_length=32, batch_size=8)
    batches, _ = train(data, 20)
    for batch in batches:
        found = [[place for place in row if place >= 0] for row in batch[LABEL_POSITIONS].tolist()]
        assert found == [torch.nonzero(row != -100).flatten().tolist() for row in batch["labels"]]
    widths = [batch[LABEL_POSITIONS].shape[1] for batch in batches]
    assert all(width % 4 == 0 for width in widths)
    assert len(set(widths)) <= 4
    assert max(widths) < 32


def test_documents_are_kept_apart_and_padding_is_apart_from_them(source):
    for packing in (PaddedDocuments(), BestFit()):
        data = build(MaskedDataModule, source, packing=packing, sequence_length=24)
        for batch in train(data, 6)[0]:
            ids, documents, places = (restored(batch), batch["document_ids"], batch["position_ids"])
            padding = documents == -1
            assert (batch["labels"][padding] == -100).all()
            assert (ids[:, 0] == 2).all()
            for row in range(len(ids)):
                end = int((~padding[row]).sum())
                assert not padding[row, :end].any()
                assert ids[row, end - 1] == 3
                assert isinstance(packing, BestFit) or end == 24 or (ids[row, :end] == 3).sum() == 1
                for number in documents[row, :end].unique():
                    own = places[row, :end][documents[row, :end] == number]
                    assert own.tolist() == list(range(len(own)))


def test_padding_of_validation_is_neither_seen_nor_predicted(source):
    data = build(MaskedDataModule, source, tokenizer="bytes", mask_share=1.0, validation_fraction=0.5)
    batches = list(data.val_dataloader())
    assert "document_ids" not in batches[0]
    last = batches[-1]
    padding = last["document_ids"] == -1
    assert padding.any()
    assert (last["labels"][padding] == -100).all()
    stored = data.packed("validation", sequence_length=16, batch_size=4, pad=True).parts.store
    special = {0, 1, 2}
    expected = [int(token) for token in stored.read(0, len(stored)) if int(token) not in special]
    labels = torch.cat([batch["labels"].flatten() for batch in batches])
    assert labels[labels != -100].tolist() == expected  # all of them are chosen, once


@pytest.mark.parametrize("kind", KINDS)
def test_very_short_rows_of_a_warm_up_are_read(kind, source):
    data = KINDS[kind](source)
    for length in (1, 2, 3):
        assert train(data, 1, sequence_length=length)[0][0]["input_ids"].shape == (4, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_token": "[MASQUE]"}, r"no mask \(\[MASQUE\]\): give a trained one special_tokens"),
        ({"mask_token": -1}, "an id is at least 0"),
        ({"mask_share": 0.0}, "data.mask_share is 0.0; it must be above 0"),
        ({"masked": 0.8, "random": 0.3}, "together they are at most 1"),
        ({"sequence_length": 2}, "at least 3 tokens"),
    ],
)
def test_mistakes_are_named(options, message, source):
    with pytest.raises(ConfigError, match=message):
        build(MaskedDataModule, source, **options)


def test_an_id_behind_the_vocabulary_may_be_the_mask(source):
    usual = build(MaskedDataModule, source)
    data = build(MaskedDataModule, source, mask_token=usual.vocab_size)
    assert data.vocab_size == usual.vocab_size + 1
    assert (joined(train(data, 8)[0])["input_ids"] == usual.vocab_size).any()


@pytest.mark.parametrize(
    ("kind", "options"),
    [(MaskedDataModule, {"mask_token": 400}), (SpanCorruptionDataModule, {"extra_ids": 30})],
)
def test_ids_behind_the_vocabulary_of_prepared_data_count_before_setup(kind, options, source):
    """The network's vocabulary is compared with that of prepared data before anything is set up."""
    folder = build(kind, source, **options).folder
    parts = TextDocuments, PretrainedTokenizer(str(source / "bert" / "tokenizer.json")), TokenShards()
    data = kind(*parts, Concatenate(), source=str(folder), sequence_length=16, **options)
    before = data.vocab_size
    data.setup()
    assert before == data.vocab_size


# -- spans --------------------------------------------------------------------------------------------------


def spans(density=0.15, mean=3.0, sentinels=400):
    return Spans(np.arange(1000 + sentinels, 1000, -1), 999, density, mean, 0)


def noise_span_to_unique_sentinel(tokens, noise_mask, vocab_size):
    """T5's own, with numpy: t5/data/preprocessors.py, function of this name."""
    previous = np.pad(noise_mask[:-1], [[1, 0]])
    first = noise_mask & ~previous
    subsequent = noise_mask & previous
    sentinel = vocab_size - np.cumsum(first.astype(tokens.dtype))
    return np.where(first, sentinel, tokens)[~subsequent]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    length=st.integers(2, 300),
    density=st.floats(0.01, 0.95),
    mean=st.floats(1.0, 10.0),
    seed=st.integers(0, 2**32),
)
def test_inputs_and_target_hold_the_whole_row(length, density, mean, seed):
    corruption = spans(density, mean)
    ids = rng(seed).integers(1, 900, length)
    mask = corruption.noise(length, rng(seed))
    inputs, target = corruption.corrupt(ids, rng(seed))
    assert inputs[:-1].tolist() == noise_span_to_unique_sentinel(ids, mask, 1401).tolist()
    assert target[:-1].tolist() == noise_span_to_unique_sentinel(ids, ~mask, 1401).tolist()
    assert (len(inputs), len(target)) == corruption.lengths(length)
    assert inputs[-1] == target[-1] == 999
    parts = np.split(target[:-1], np.flatnonzero(target[:-1] > 1000))[1:]
    found = {part[0]: part[1:] for part in parts}
    assert all(len(part) for part in found.values())
    restored = [found.get(token, [token]) for token in inputs[:-1]]
    assert np.concatenate(restored).tolist() == ids.tolist()
    noise = min(max(round(length * density), 1), length - 1)
    assert mask.sum() == noise
    assert len(found) == min(max(round(noise / mean), 1), noise, length - noise)


@pytest.mark.parametrize(("inputs", "raw", "target"), [(512, 568, 114), (1024, 1137, 229), (256, 284, 58)])
def test_lengths_are_those_of_the_paper(inputs, raw, target):
    """568 and 114 are printed by T5's `compute_input_and_target_lengths` for 512; the others follow from its definition."""
    assert spans().raw_length(inputs) == raw
    assert spans().lengths(raw) == (inputs, target)


@pytest.mark.parametrize("mean", [1.0, 3.0])
def test_inputs_are_never_longer_than_the_sequence(mean):
    corruption = spans(0.15, mean)
    for length in range(3, 200):
        raw = corruption.raw_length(length)
        assert corruption.lengths(raw)[0] <= length < corruption.lengths(raw + 1)[0]


def test_every_way_to_cut_spans_is_equally_likely():
    corruption, generator = spans(0.5, 2.0), rng()
    count = 10_000
    found = {}
    for _ in range(count):
        mask = corruption.noise(12, generator)  # 6 tokens in 3 spans, and 6 between them: 10 ways each
        found[mask.tobytes()] = found.get(mask.tobytes(), 0) + 1
    assert len(found) == 100
    chi_squared = sum((n - count / 100) ** 2 / (count / 100) for n in found.values())
    assert chi_squared < 165  # of 99 degrees of freedom, but for 1 in 30,000


def test_a_batch_of_spans_is_what_a_decoder_reads(source):
    data = build(SpanCorruptionDataModule, source, extra_ids=20)
    [batch], _ = train(data, 1)
    assert batch["input_ids"].shape == (4, 16)
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["labels"][:, :-1])
    assert (batch["decoder_input_ids"][:, 0] == 0).all()
    assert (batch["labels"][:, -1] == data.end_of_text_id).all()
    assert (batch["labels"][:, 0] == data.vocab_size - 1).all()
    assert "document_ids" not in batch
    data = build(SpanCorruptionDataModule, source, extra_ids=20, packing=PaddedDocuments())
    batch = joined(train(data, 1)[0])
    padding = batch["decoder_document_ids"] == -1
    assert padding.any()
    assert torch.equal(padding, batch["labels"] == -100)
    assert (batch["input_ids"][batch["document_ids"] == -1] == 0).all()


def test_mistakes_with_spans_are_named(source):
    with pytest.raises(
        ConfigError,
        match=r"Rows of 16 tokens have 1 spans, and there are no sentinels: set data.extra_ids=100",
    ):
        build(SpanCorruptionDataModule, source)
    with pytest.raises(ConfigError, match=r"noise_density is 1\.5"):
        build(SpanCorruptionDataModule, source, noise_density=1.5)
    with pytest.raises(ConfigError, match="decoder_start_id is 5000, and the vocabulary has"):
        build(SpanCorruptionDataModule, source, extra_ids=9, decoder_start_id=5000)
    data = build(SpanCorruptionDataModule, source, extra_ids=9, packing=BestFit(), sequence_length=40)
    with pytest.raises(ConfigError, match="takes rows of one document"):
        train(data, 2)
