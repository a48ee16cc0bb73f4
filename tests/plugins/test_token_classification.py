"""Classes of words are learnt at their first tokens, with transformers' loss."""

import pytest
import torch

from plugins.networks.bert import BERT
from plugins.objectives.token_classification import TokenClassification
from tests.support.reference_models import both, lively, tokens

SIZES = {"vocab_size": 61, "n_layer": 2, "n_head": 4, "n_embd": 32, "max_sequence_length": 64, "intermediate_size": 48}  # fmt: skip
NAMES = ["noun", "verb", "other", "never"]


def test_the_loss_and_the_classes_are_those_of_transformers():
    from transformers import BertForTokenClassification

    with_head, reference = both(BERT, SIZES)
    network = BERT(**SIZES, head=False).eval()
    network.load_state_dict({k: v for k, v in with_head.state_dict().items() if not k.startswith("head.")})
    objective = TokenClassification(NAMES)
    objective.change_network(network)
    lively(objective, seed=1)
    reference.config.num_labels = len(NAMES)
    theirs = BertForTokenClassification(reference.config).eval()
    theirs.bert.load_state_dict(reference.bert.state_dict())
    theirs.classifier.load_state_dict(objective.head.output.state_dict())
    generator = torch.Generator().manual_seed(0)
    ids = tokens(3, 40)
    inside = torch.arange(40) < torch.tensor([40, 23, 7])[:, None]
    labels = torch.randint(3, ids.shape, generator=generator)
    first = torch.rand(ids.shape, generator=generator) < 0.6
    labels = labels.masked_fill(~(first & inside), -100)
    expected = theirs(input_ids=ids, attention_mask=inside.long(), labels=labels)
    batch = {"input_ids": ids, "labels": labels, "document_ids": torch.where(inside, 0, -1)}
    loss, figures = objective.loss(network, batch)
    assert loss.mean.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert int(loss.tokens) == int((labels >= 0).sum())
    found = [one["prediction"] for one in objective.predict(network, batch)]
    assert found == [NAMES[k] for k in expected.logits.argmax(-1)[labels >= 0].tolist()]
    right = (expected.logits.argmax(-1) == labels).sum() / loss.tokens
    assert figures["accuracy"].mean.item() == pytest.approx(right.item())
