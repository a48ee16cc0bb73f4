"""Rewards of a line each: regular expressions, lengths, sums."""

import math

import pytest

from core.errors import ConfigError
from plugins.rewards.exact_answer import ExactAnswer
from plugins.rewards.length_penalty import LengthPenalty
from plugins.rewards.regex_reward import RegexReward
from plugins.rewards.weighted_rewards import WeightedRewards
from toolkit.rewards import Reward, Sample, repetition, score


def sample(answer="", tokens=1, **record):
    return Sample("a prompt", answer, list(range(tokens)), True, record)


def test_a_regular_expression_in_or_around_an_answer():
    answers = [
        sample(text) for text in ("<think>a\nb</think>4", " <think>a</think>4 \n", "x <think>a</think>4", "4")
    ]
    pattern = "<think>.+</think>.+"
    assert RegexReward(pattern).score(answers) == [1, 1, 1, 0]
    assert RegexReward(pattern, whole=True, found=0.5, absent=-0.5).score(answers) == [0.5, 0.5, -0.5, -0.5]
    with pytest.raises(ConfigError, match="no regular expression of Python: "):
        RegexReward("(")


def test_the_length_penalty_is_equation_13_of_dapo():
    """R = 0, ((L_max - L_cache) - |y|) / L_cache, -1."""
    found = LengthPenalty(longest=20, buffer=8).score([sample(tokens=n) for n in range(25)])
    assert found == [0.0] * 13 + [(20 - 8 - n) / 8 for n in range(13, 21)] + [-1.0] * 4
    assert LengthPenalty(longest=2).score([sample(tokens=n) for n in range(4)]) == [0, 0, 0, -1]
    for options in ({"longest": 0}, {"longest": 2, "buffer": 3}, {"longest": 2, "buffer": -1}):
        with pytest.raises(ConfigError, match="0 <= buffer <= longest"):
            LengthPenalty(**options)


def test_a_weighted_sum_and_its_parts():
    rewards = {"right": ExactAnswer("result"), "short": LengthPenalty(longest=4, buffer=4)}
    weighted = WeightedRewards(rewards, {"short": 0.5})
    samples = [sample("4", 2, result="4"), sample("5", 9, result="4")]
    found = score(weighted, samples)
    assert found.parts == {"right": [1, 0], "short": [-0.5, -1]}
    assert found.values == weighted.score(samples) == [0.75, -0.5]
    assert score(rewards["right"], samples).parts == {}


def test_mistakes_in_weights():
    with pytest.raises(ConfigError, match="is empty"):
        WeightedRewards({})
    with pytest.raises(ConfigError, match=r"no reward 'rigth'.*Did you mean right"):
        WeightedRewards({"right": ExactAnswer()}, {"rigth": 1.0})
    with pytest.raises(ConfigError, match="that of right is inf"):
        WeightedRewards({"right": ExactAnswer()}, {"right": math.inf})


class Given(Reward):
    def __init__(self, values):
        self.values = values

    def score(self, samples):
        return self.values


@pytest.mark.parametrize("value", [math.nan, -math.inf, None, "high"])
def test_a_value_that_is_no_number_names_reward_sample_and_remedy(value):
    samples = [sample("fine"), sample("so so " * 50)]
    for reward in (Given([1.0, value]), WeightedRewards({"mine": Given([1.0, value])})):
        with pytest.raises(ConfigError) as caught:
            score(reward, samples)
        message = str(caught.value)
        assert f"The reward Given gave {value!r} for sample 2 of 2" in message
        assert "'so so " in message
        assert "has to be a finite number" in message
        assert len(message.splitlines()) <= 10


@pytest.mark.parametrize(("values", "told"), [([1.0], "1 values"), (None, "NoneType"), ([], "0 values")])
def test_another_number_of_values_than_of_samples(values, told):
    with pytest.raises(ConfigError, match=f"Given gave {told} for 2 samples"):
        score(Given(values), [sample(), sample()])


def test_repetition_is_the_share_of_ngrams_seen_before():
    assert repetition([1, 2, 3]) == 0
    assert repetition([1, 2, 3, 4]) == 0
    assert repetition([7] * 13) == pytest.approx(9 / 10)  # 10 4-grams, all the same
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repetition([1, 2, 1, 2], n=2) == pytest.approx(1 / 3)
