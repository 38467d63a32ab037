"""Drawing tokens: the distribution, the recorded log-probability, and what a draw depends on."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl.inference.sampling import How, draw, sample_tokens, seed_words

sample = jax.jit(sample_tokens)


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _seeds(n: int) -> np.ndarray:
    return np.stack([seed_words(i) for i in range(n)])


def _logits(rows: int, vocab: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (rows, vocab)).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 33, 20000])
def test_temperature_zero_takes_the_most_likely_and_its_logprob_at_temperature_one(vocab):
    logits = _logits(6, vocab)

    token, logp = sample(logits, np.zeros(6, np.float32), _seeds(6), np.arange(6, dtype=np.int32))

    np.testing.assert_array_equal(token, logits.argmax(-1))
    expected = np.take_along_axis(_log_softmax(logits), logits.argmax(-1)[:, None], 1)[:, 0]
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_logprob_is_of_the_tempered_distribution(temperature):
    logits = _logits(6, 33)
    temperatures = np.full(6, temperature, np.float32)

    token, logp = sample(logits, temperatures, _seeds(6), np.zeros(6, np.int32))

    expected = _log_softmax(logits / temperature)[np.arange(6), np.asarray(token)]
    np.testing.assert_allclose(logp, expected, rtol=1e-5, atol=1e-5)


def test_smallest_temperature_takes_the_most_likely_with_certainty():
    logits = 100 * _logits(6, 33)
    temperatures = np.full(6, np.finfo(np.float32).tiny)

    token, logp = sample(logits, temperatures, _seeds(6), np.zeros(6, np.int32))

    np.testing.assert_array_equal(token, logits.argmax(-1))
    np.testing.assert_array_equal(logp, np.zeros(6))


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_frequencies_follow_the_distribution(temperature):
    draws, vocab = 20000, 33
    logits = np.broadcast_to(_logits(1, vocab, seed=3), (draws, vocab))
    temperatures = np.full(draws, temperature, np.float32)

    token, _ = sample(logits, temperatures, _seeds(draws), np.full(draws, 9, np.int32))

    probs = np.exp(_log_softmax(logits[0] / temperature))
    counts = np.bincount(np.asarray(token), minlength=vocab)
    spread = np.sqrt(draws * probs * (1 - probs)) + 1
    assert np.all(np.abs(counts - draws * probs) < 5 * spread)


def test_consecutive_positions_of_one_seed_are_independent_draws():
    draws, vocab = 20000, 33
    logits = np.zeros((draws, vocab), np.float32)
    seeds = np.broadcast_to(seed_words(123), (draws, 2))

    token, _ = sample(logits, np.ones(draws, np.float32), seeds, np.arange(draws, dtype=np.int32))

    pairs = np.bincount(np.asarray(token)[1:] * vocab + np.asarray(token)[:-1], minlength=vocab**2)
    expected = draws / vocab**2
    assert np.all(np.abs(pairs - expected) < 6 * np.sqrt(expected))


def test_draw_depends_on_seed_and_position_only():
    rows = 20000
    logits = np.broadcast_to(_logits(1, 33), (rows, 33))
    seeds, positions = _seeds(rows), np.arange(rows, dtype=np.int32)
    order = np.random.default_rng(0).permutation(rows)

    token, logp = sample(logits, np.ones(rows, np.float32), seeds, positions)
    again, logp_again = sample(logits, np.ones(rows, np.float32), seeds[order], positions[order])

    np.testing.assert_array_equal(np.asarray(token)[order], again)
    np.testing.assert_array_equal(np.asarray(logp)[order], logp_again)
    assert len(set(np.asarray(token).tolist())) > 5


@pytest.mark.parametrize("vocab", [33, 20000])
def test_impossible_tokens_are_never_drawn(vocab):
    logits = np.full((2000, vocab), -np.inf, np.float32)
    logits[:, [3, vocab - 2]] = 0.0

    token, logp = sample(logits, np.ones(2000, np.float32), _seeds(2000), np.zeros(2000, np.int32))

    assert set(np.asarray(token).tolist()) <= {3, vocab - 2}
    np.testing.assert_allclose(logp, np.log(0.5), rtol=1e-6, atol=1e-6)


def test_not_a_number_logits_give_a_token_of_the_vocabulary_and_a_bad_logprob():
    token, logp = sample(
        np.full((6, 33), np.nan, np.float32),
        np.array([0, 1, 0.5, 0, 1, 2], np.float32),
        _seeds(6),
        np.zeros(6, np.int32),
    )

    assert np.all((np.asarray(token) >= 0) & (np.asarray(token) < 33))
    assert np.all(np.isnan(np.asarray(logp)))


def test_seed_words_keeps_64_bits_and_wraps():
    np.testing.assert_array_equal(seed_words((5 << 32) + 7), [5, 7])
    np.testing.assert_array_equal(seed_words(-1), [0xFFFFFFFF, 0xFFFFFFFF])
    np.testing.assert_array_equal(seed_words(1 << 64), [0, 0])


def _draw(logits, *, top_k=0, top_p=1.0, temperature=1.0, alternatives=0, wanted=None):
    rows = len(logits)
    how = How(
        temperature=np.full(rows, temperature, np.float32),
        top_k=np.full(rows, top_k, np.int32),
        top_p=np.full(rows, top_p, np.float32),
        seed=_seeds(rows),
        alternatives=np.full(rows, alternatives if wanted is None else wanted, np.int32),
    )
    drawn = jax.jit(draw, static_argnames="alternatives")(
        logits, how, np.zeros(rows, np.int32), alternatives=alternatives
    )
    return jax.tree.map(np.asarray, drawn)


def _kept(logits, top_k, top_p):
    """The tokens that sorting and adding up keeps, and their renormalised probabilities."""
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")[: top_k or None]
    share = np.cumsum(probs[order]) / probs[order].sum()
    order = order[: int(np.searchsorted(share, top_p - 1e-9)) + 1]
    return {int(token): probs[token] / probs[order].sum() for token in order}


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (3, 1.0), (0, 0.5), (0, 0.05), (5, 0.7), (50, 0.9), (0, 0.999)]
)
def test_only_the_most_likely_tokens_are_drawn_with_their_renormalised_logprobs(top_k, top_p):
    logits = np.random.default_rng(3).normal(0, 2, 37).astype(np.float32)
    expected = _kept(logits.astype(np.float64), top_k, top_p)

    drawn = _draw(np.tile(logits, (4000, 1)), top_k=top_k, top_p=top_p)

    counts = np.bincount(drawn.token, minlength=37)
    assert set(np.flatnonzero(counts)) <= set(expected)
    for token, probability in expected.items():
        np.testing.assert_allclose(counts[token] / 4000, probability, rtol=0, atol=0.03)
    logps = [np.log(expected[int(token)]) for token in drawn.token]
    np.testing.assert_allclose(drawn.logp, logps, rtol=0, atol=1e-5)


def test_truncation_of_one_row_leaves_the_draws_of_the_others_as_they_were():
    logits = np.random.default_rng(3).normal(0, 2, (6, 100)).astype(np.float32)
    ones, zeros = np.ones(6, np.float32), np.zeros(6, np.int32)
    plain = How(ones, zeros, ones, _seeds(6), zeros)
    mixed = plain._replace(top_k=np.array([0, 0, 2, 0, 0, 0], np.int32))

    alone, beside = (jax.jit(draw)(logits, how, zeros) for how in (plain, mixed))

    others = np.array([0, 1, 3, 4, 5])
    np.testing.assert_array_equal(alone.token[others], beside.token[others])
    np.testing.assert_array_equal(alone.logp[others], beside.logp[others])


def test_equally_likely_tokens_at_the_edge_are_all_kept():
    drawn = _draw(np.zeros((2000, 10), np.float32), top_k=3)

    assert set(drawn.token) == set(range(10))


def test_greedy_ignores_truncation():
    logits = np.random.default_rng(3).normal(0, 2, (3, 20)).astype(np.float32)

    plain, cut = (_draw(logits, temperature=0.0, top_k=k, top_p=p) for k, p in ((0, 1.0), (2, 0.1)))

    np.testing.assert_array_equal(plain.token, cut.token)
    np.testing.assert_array_equal(plain.logp, cut.logp)


def test_alternatives_are_the_most_likely_tokens_of_the_distribution_sampled_from():
    logits = np.random.default_rng(3).normal(0, 2, (2, 30)).astype(np.float32)

    drawn = _draw(logits, temperature=0.7, top_k=2, alternatives=4, wanted=3)

    for row in range(2):
        order = np.argsort(-logits[row])[:3]
        kept = np.log(list(_kept(logits[row] / 0.7, 2, 1.0).values()))
        np.testing.assert_array_equal(drawn.top_tokens[row], [*order, -1])
        np.testing.assert_allclose(drawn.top_logps[row], [*kept, -np.inf, 0.0], rtol=0, atol=1e-5)
