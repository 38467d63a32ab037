"""Log-probabilities: the numbers of a plain log_softmax, without ever holding all logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl.models.logprobs import chunk_width
from jaxrl.models.model import forward, sequence_logprobs, token_logprobs, unembed


def _plain(model, params, hidden, targets, temperature=1.0):
    """(logp, entropy) by the book, with all logits at once."""
    table = jax.nn.log_softmax(unembed(model, params, hidden) / temperature, axis=-1)
    logp = jnp.take_along_axis(table, targets[..., None], axis=-1)[..., 0]
    return logp, -jnp.sum(jnp.exp(table) * table, axis=-1)


@pytest.fixture
def hidden_and_targets(make_tokens):
    hidden = jnp.array(np.random.default_rng(1).normal(size=(3, 8, 32)), jnp.float32)
    return hidden, make_tokens(3, 8, seed=2)[0]


@pytest.mark.parametrize(
    ("chunk", "tie_embeddings"), [(1, True), (7, True), (8, False), (16, False), (1000, True)]
)
def test_token_logprobs_any_chunk_equals_log_softmax(
    make_model, hidden_and_targets, chunk, tie_embeddings
):
    model, params = make_model(tie_embeddings=tie_embeddings)

    logp, entropy = token_logprobs(model, params, *hidden_and_targets, chunk=chunk)

    expected_logp, expected_entropy = _plain(model, params, *hidden_and_targets)
    np.testing.assert_allclose(logp, expected_logp, rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, rtol=0, atol=1e-5)
    assert logp.dtype == entropy.dtype == jnp.float32


@pytest.mark.parametrize(
    ("chunk", "rows", "devices", "width"),
    [
        *[(256, 16, 1, 16), (256, 2, 8, 128), (16, 2, 8, 8), (8192, 2, 16, 256)],
        *[(16384, 2, 256, 128), (1, 4, 1, 1), (5, 4, 8, 1), (7, 0, 1, 7)],
    ],
)
def test_chunk_width_on_many_devices_leaves_each_enough_tokens(chunk, rows, devices, width):
    assert chunk_width(chunk, rows, devices) == width


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_token_logprobs_temperature_divides_the_logits(make_model, hidden_and_targets, temperature):
    model, params = make_model()

    result = token_logprobs(model, params, *hidden_and_targets, temperature=temperature, chunk=8)

    expected = _plain(model, params, *hidden_and_targets, temperature)
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-5)
    assert np.abs(result[0] - _plain(model, params, *hidden_and_targets)[0]).max() > 0.1


def test_token_logprobs_uniform_logits_by_hand(make_model):
    model, params = make_model()

    logp, entropy = token_logprobs(
        model, params, jnp.zeros((1, 2, 32)), jnp.zeros((1, 2), jnp.int32)
    )

    np.testing.assert_allclose(logp, np.full((1, 2), -np.log(64)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(entropy, np.full((1, 2), np.log(64)), rtol=0, atol=1e-6)


def test_token_logprobs_gradient_equals_plain_gradient(make_model, hidden_and_targets):
    model, params = make_model()
    hidden, targets = hidden_and_targets
    weights = jnp.linspace(-1, 1, targets.size).reshape(targets.shape)

    def loss(function, params, hidden, **options):
        return jnp.sum(weights * function(model, params, hidden, targets, **options)[0])

    actual = jax.grad(lambda p, h: loss(token_logprobs, p, h, chunk=8), (0, 1))(params, hidden)

    expected = jax.grad(lambda p, h: loss(_plain, p, h), (0, 1))(params, hidden)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), actual, expected)


def test_token_logprobs_entropy_carries_no_gradient(make_model, hidden_and_targets):
    model, params = make_model()
    hidden, targets = hidden_and_targets

    gradient = jax.grad(lambda h: token_logprobs(model, params, h, targets, chunk=8)[1].sum())(
        hidden
    )

    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"chunk": 0}, "chunk=0"),
    ],
)
def test_token_logprobs_impossible_option_is_an_error(
    make_model, hidden_and_targets, options, words
):
    model, params = make_model()

    with pytest.raises(ValueError, match=words):
        token_logprobs(model, params, *hidden_and_targets, **options)


def _largest(jaxpr) -> int:
    """Number of elements of the largest array that a jaxpr makes, inner jaxprs included."""
    largest = 0
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            largest = max(largest, int(np.prod(getattr(variable.aval, "shape", ()))))
        for parameter in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                largest = max(largest, _largest(inner))
    return largest


def _loss_of(function, model, tokens, positions, **options):
    def loss(params):
        hidden, _ = forward(model, params, tokens, positions)
        logp, entropy = function(model, params, hidden, tokens, **options)
        return jnp.sum(logp), jnp.sum(entropy)

    return loss


def test_gradient_holds_no_array_of_all_logits(make_model, make_tokens):
    batch, length, vocab = 4, 32, 2048
    model, params = make_model(vocab_size=vocab)
    tokens, positions = make_tokens(batch, length, vocab)
    chunked = _loss_of(token_logprobs, model, tokens, positions, chunk=16)
    plain = _loss_of(_plain, model, tokens, positions)
    trace = lambda loss: jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params).jaxpr

    # The weight [V, D] is twice as large as the logits of one chunk, and must be there.
    assert _largest(trace(chunked)) == vocab * 32
    assert _largest(trace(plain)) == batch * length * vocab


def test_sequence_logprobs_index_i_describes_token_i(make_model, make_tokens, run_logprobs):
    model, params = make_model()
    tokens, positions = make_tokens(2, 8)

    one_segment = jnp.ones_like(tokens)

    logp, entropy = run_logprobs(model, params, tokens, positions, one_segment, temperature=1.0)

    hidden, _ = forward(model, params, tokens, positions)
    expected_logp, expected_entropy = _plain(model, params, hidden[:, :-1], tokens[:, 1:])
    np.testing.assert_allclose(logp[:, 1:], expected_logp, rtol=0, atol=1e-5)
    np.testing.assert_allclose(entropy[:, 1:], expected_entropy, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(logp[:, 0], [0, 0])
    np.testing.assert_array_equal(entropy[:, 0], [0, 0])


def test_sequence_logprobs_without_segments_is_one_segment(make_model, make_tokens, run_logprobs):
    model, params = make_model()
    tokens, positions = make_tokens(2, 8)

    actual = run_logprobs(model, params, tokens, positions, None, temperature=1.0)

    ones = jnp.ones_like(tokens)
    expected = run_logprobs(model, params, tokens, positions, ones, temperature=1.0)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)


def test_sequence_logprobs_packed_equals_separate_and_zero_without_past(
    make_model, packed_batch, run_logprobs
):
    model, params = make_model()
    tokens, positions, segment_ids = packed_batch

    logp, entropy = run_logprobs(model, params, tokens, positions, segment_ids, temperature=0.7)

    logp, entropy = np.asarray(logp), np.asarray(entropy)
    for row, start, stop in [(0, 0, 3), (0, 3, 5), (1, 0, 8)]:
        alone, order, segment = np.zeros((3, 2, 8), np.int32)
        n = stop - start
        alone[0, :n] = np.asarray(tokens)[row, start:stop]
        order[0, :n], segment[0, :n] = range(n), 1
        expected, _ = run_logprobs(model, params, alone, order, segment, temperature=0.7)
        expected = np.asarray(expected)[0, :n]
        np.testing.assert_allclose(logp[row, start:stop], expected, rtol=0, atol=1e-5)
        assert logp[row, start] == entropy[row, start] == 0
    np.testing.assert_array_equal(logp[0, 5:], [0, 0, 0])
    np.testing.assert_array_equal(entropy[0, 5:], [0, 0, 0])


def test_gradient_with_padding_and_fully_padded_row_is_that_of_the_tokens(make_model, packed_batch):
    model, params = make_model(n_layers=1, qk_norm=True)
    empty_row = [np.concatenate([x, np.zeros((1, 8), np.int32)]) for x in packed_batch]
    full_row = [np.concatenate([x, np.asarray(x)[1:]]) for x in packed_batch]

    @jax.jit
    @jax.grad
    def gradient(params, tokens, positions, segment_ids, row_weights):
        logp, _ = sequence_logprobs(model, params, tokens, positions, segment_ids, chunk=16)
        return jnp.sum(logp * row_weights[:, None])

    padded = gradient(params, *empty_row, np.float32([1, 1, 1]))

    expected = gradient(params, *full_row, np.float32([1, 1, 0]))
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)
