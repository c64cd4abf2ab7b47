"""Tests, in the order of the scripts: `python -m pytest`, less with `-m "not slow"`."""

import ast
from concurrent.futures import ThreadPoolExecutor
import dataclasses
import difflib
import functools
import os
from pathlib import Path
import re
import socket
import subprocess
import sys
import tomllib

import compare  # before gymnax: it sets the number of CPU devices

# isort: split
import flax
from flax.training import train_state as flax_train_state
from gymnax.environments import environment, spaces
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.special
import tyro

import ppo_eqx
import ppo_flax

FOLDER = Path(__file__).parent
README = (FOLDER / "README.md").read_text()
SCRIPTS = {"eqx": ppo_eqx, "flax": ppo_flax}
both = pytest.mark.parametrize("ppo", SCRIPTS.values(), ids=SCRIPTS.keys())
slow = pytest.mark.slow


class Probe(environment.Environment):
    """Rooms with known values, one-hot. All but room 1 end, or are cut, in one step."""

    # Reward of action 0 and 1 in each room; room 1 leads on to room 2.
    REWARDS = ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0), (-1.0, -1.0), (0.0, 1.0), (1.0, 0.0),
               (1.0, 1.0))  # fmt: skip
    STARTS, DELAYED, CUT = (0, 1, 3, 4, 5, 6), 1, 6

    default_params = environment.EnvParams(max_steps_in_episode=2)

    def reset_env(self, key, params):
        room = jax.random.choice(key, jnp.array(self.STARTS))
        return jax.nn.one_hot(room, 7), environment.EnvState(time=room)

    def step_env(self, key, state, action, params):
        reward = jnp.array(self.REWARDS)[state.time, action]
        room = jnp.where(state.time == self.DELAYED, 2, state.time)
        terminated = (state.time != self.DELAYED) & (state.time != self.CUT)
        state = environment.EnvState(time=room)
        return jax.nn.one_hot(room, 7), state, reward, terminated, {}

    def is_truncated(self, state, params):
        return state.time == self.CUT

    def action_space(self, params):
        return spaces.Discrete(2)


PROBE = LogWrapper(FlattenObservationWrapper(Probe()))
CARTPOLE = ppo_eqx.make_env("CartPole-v1")


def small(ppo, **kwargs):
    """Arguments of a short run, 8 iterations of 4 x 32 steps, with large updates."""
    defaults = dict(num_steps=32, total_timesteps=1024, num_reports=2)
    return ppo.Args(**defaults | dict(learning_rate=1e-2) | kwargs)


@functools.cache
def start(ppo, args, env=CARTPOLE, seed=1):
    """The runner state before the first iteration."""
    init = jax.jit(ppo.init, static_argnums=(1, 2))
    return init(jax.random.key(seed), env, args)


@functools.cache
def trained(ppo, args, num_iterations, env=CARTPOLE):
    """Runner state and metrics after some iterations, as one call."""
    train = jax.jit(ppo.train, static_argnums=(1, 2, 3))
    return train(start(ppo, args, env), env, args, num_iterations)


def assert_same_bits(a, b):
    """The same tree of arrays, without any tolerance."""
    a, b = jax.device_get((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def as_network(ppo, function):
    """What stands for a network in make_batch and ppo_loss: a function of obs."""
    return (function,) if ppo is ppo_eqx else (None, lambda _, obs: function(obs))


def table_state(ppo, table, tx):
    """Train state of a network that looks up logits, value in table[obs] (A + 1,)."""

    def look_up(table, obs):
        row = table[obs[..., 0].astype(int)]
        return row[..., :-1], row[..., -1]

    if ppo is ppo_eqx:
        model = jax.tree_util.Partial(look_up, table)
        return ppo_eqx.TrainState(model, tx.init(model), tx)
    apply_fn = lambda params, obs: look_up(params["table"], obs)
    create = flax_train_state.TrainState.create
    return create(apply_fn=apply_fn, params={"table": table}, tx=tx)


def run_script(ppo, *flags, env=None):
    """Run a script as a user does; warnings are errors."""
    command = [sys.executable, "-W", "error", ppo.__file__, *flags]
    env = os.environ | (env or {})
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=FOLDER)


# Siblings: what they share to the letter is tested once, below


def definitions(ppo):
    """Source of each top-level definition, by name, in order."""
    source = Path(ppo.__file__).read_text()
    return {
        getattr(node, "name", ast.unparse(getattr(node, "targets", [node])[0])):
        ast.get_source_segment(source, node)
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Assign)
    }  # fmt: skip


SHARED = (
    "Args make_optimizer Transition RunnerState log_prob_and_entropy compute_gae Batch "
    "evaluate make_env reset LOSSES report main"
).split()
OWN = {"make_linear", "MLP", "TrainState", "make_mlp", "make_network"}


def test_shared_definitions_have_the_same_source_and_order():
    eqx_definitions, flax_definitions = definitions(ppo_eqx), definitions(ppo_flax)
    for name in SHARED:
        assert eqx_definitions[name] == flax_definitions[name], name
    shared = [
        [n for n in x if n not in OWN] for x in (eqx_definitions, flax_definitions)
    ]
    assert shared[0] == shared[1]


def test_the_diff_is_small():
    a, b = (Path(ppo.__file__).read_text().splitlines() for ppo in SCRIPTS.values())
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    changes = [x for x in opcodes if x[0] != "equal"]
    assert len(changes) <= 16
    assert sum(x[2] - x[1] + x[4] - x[3] for x in changes) <= 100


# Arguments


def test_help_shows_the_comment_of_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_info:
        tyro.cli(ppo_eqx.Args, args=["--help"])
    assert exit_info.value.code == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    source = Path(ppo_eqx.__file__).read_text()
    for field in dataclasses.fields(ppo_eqx.Args):
        comment = re.search(rf"^    {field.name}: .*  # (.+)$", source, re.MULTILINE)
        assert comment, f"no comment behind {field.name}"
        assert comment[1] in shown
        assert "--" + field.name.replace("_", "-") in shown


COUNTS = "total_timesteps num_envs num_steps num_minibatches update_epochs num_reports"
BAD_VALUES = [
    *((name, value, "at least") for value in (0, -1)
      for name in f"{COUNTS} eval_episodes".split()),
    *((name, value, "above 0") for value in (0.0, -1.0, np.nan, np.inf)
      for name in ("learning_rate", "clip_coef", "max_grad_norm")),
    *((name, value, "at least 0") for value in (-1.0, np.nan, np.inf)
      for name in ("ent_coef", "vf_coef")),
    *((name, value, "from 0 to 1") for value in (-0.1, 1.1, np.nan, np.inf)
      for name in ("gamma", "gae_lambda")),
    *(("seed", value, "from 0 to") for value in (-1, 2**32)),
    ("num_minibatches", 3, "a divisor of the batch of 512"),
    ("num_minibatches", 512, "--no-norm-adv"),
    ("total_timesteps", 511, "at least the batch of 512"),
]  # fmt: skip


@pytest.mark.parametrize("name, value, message", BAD_VALUES)
def test_values_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message) as error:
        ppo_eqx.Args(**{name: value})
    assert "\n" not in str(error.value)
    assert "--" + name.replace("_", "-") in str(error.value) or "norm" in message


BAD_FLAGS = {
    "--gamma 2": "--gamma must be from 0 to 1, not 2.0",
    "--total-timesteps 5e5": "--total-timesteps",
    "--activation gelu": "'tanh', 'relu'",
    "--learning-rte 1e-3": "--learning-rate",
    "--env-id CartPole": "cannot train CartPole: CartPole is not in registered",
    "--env-id Pendulum-v1": "its actions are not discrete",
    "--env-id FrozenLake-misc": "its observations are not arrays",
    "--save-path .": "--save-path .: a folder",
    "--save-path no/such/policy": "--save-path no/such/policy: ",
    f"--save-path {__file__}/policy": "none that is writable",
}


@both
@pytest.mark.parametrize("flags", BAD_FLAGS)
def test_bad_flags_are_refused_before_anything_is_printed(ppo, flags, capsys):
    with pytest.raises(SystemExit) as exit_info:
        ppo.main(tyro.cli(ppo.Args, args=flags.split()))
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    assert BAD_FLAGS[flags] in " ".join(err.replace("│", " ").split())
    assert "Traceback" not in err and not out


def test_arguments_that_differ_in_the_seed_alone_are_the_same_to_jit():
    assert ppo_eqx.Args(seed=1) == ppo_eqx.Args(seed=2)
    assert hash(ppo_eqx.Args(seed=1)) == hash(ppo_eqx.Args(seed=2))
    assert ppo_eqx.Args(gamma=0.9) != ppo_eqx.Args()
    assert ppo_eqx.make_optimizer(ppo_eqx.Args()) is ppo_eqx.make_optimizer(
        ppo_eqx.Args(seed=2)
    )


@pytest.mark.parametrize(
    "flags, iterations",
    [
        ({}, 976),
        (dict(total_timesteps=15872), 31),
        (dict(total_timesteps=24064, num_reports=30), 47),
        (dict(total_timesteps=15872, num_envs=8, num_steps=32, num_reports=7), 62),
        (dict(num_reports=500), 976),
        (dict(total_timesteps=1000), 1),
    ],
)
def test_every_whole_batch_is_an_iteration(flags, iterations):
    assert ppo_eqx.Args(**flags).num_iterations == iterations


# Networks and optimizer


@both
def test_initial_weights_are_orthogonal_and_not_shared(ppo):
    params = compare.params_of(start(ppo, small(ppo)).train_state)
    params = compare.flax_layout(params)["params"]
    for name, out_scale in (("actor", 0.01), ("critic", 1.0)):
        layers, scales = params[name], (2**0.5, 2**0.5, out_scale)
        for layer, scale in zip(("layers_0", "layers_2", "layers_4"), scales):
            kernel, bias = layers[layer]["kernel"], layers[layer]["bias"]
            kernel = kernel if kernel.shape[0] > kernel.shape[1] else kernel.T
            expected = scale**2 * np.eye(kernel.shape[1])
            np.testing.assert_allclose(kernel.T @ kernel, expected, atol=2e-6)
            assert not bias.any()
    for layer in ("layers_0", "layers_2"):
        actor, critic = params["actor"][layer], params["critic"][layer]
        assert (actor["kernel"] != critic["kernel"]).any()


@both
def test_apply_gradients_is_a_step_of_optax_and_keeps_its_state(ppo):
    train_state = table_state(ppo, jnp.ones((3, 2)), optax.adam(0.1))
    params, opt_state = compare.params_of(train_state), train_state.opt_state
    for step in range(1, 4):
        grads = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), params)
        updates, opt_state = train_state.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        train_state = train_state.apply_gradients(grads=grads)
    assert_same_bits(compare.params_of(train_state), params)
    assert_same_bits(train_state.opt_state, opt_state)


def clipped_adam(grads, learning_rates, max_norm):
    """Parameters after Adam's steps from 0 with clipped gradients, in NumPy."""
    x, mean, square = 0.0, 0.0, 0.0
    for step, (grad, learning_rate) in enumerate(zip(grads, learning_rates), 1):
        grad = grad * min(1, max_norm / np.linalg.norm(grad))
        mean = 0.9 * mean + 0.1 * grad
        square = 0.999 * square + 0.001 * grad**2
        root = np.sqrt(square / (1 - 0.999**step))
        x = x - learning_rate * mean / (1 - 0.9**step) / (root + 1e-5)
        yield x


@pytest.mark.parametrize("anneal_lr", [True, False])
def test_optimizer_is_adam_with_clipping_and_a_rate_that_ends_at_zero(anneal_lr):
    # 3 iterations of 2 epochs of 2 minibatches: 12 gradient steps and two more.
    args = ppo_eqx.Args(
        num_steps=8, total_timesteps=100, num_minibatches=2, update_epochs=2,
        learning_rate=0.1, max_grad_norm=0.5, anneal_lr=anneal_lr,
    )  # fmt: skip
    assert args.num_iterations == 3
    # Large ones are clipped; to the small ones 1e-5 is not nothing, as 1e-8 would be.
    grads = np.random.default_rng(0).normal(size=(14, 3))
    grads *= np.where(np.arange(14) % 2, 3.0, 1e-5)[:, None]
    rates = 0.1 * np.clip(1 - np.arange(14) / 12, 0, 1) if anneal_lr else [0.1] * 14
    tx = ppo_eqx.make_optimizer(args)
    params = jnp.zeros(3)
    opt_state = tx.init(params)
    for grad, expected in zip(grads, clipped_adam(grads, rates, 0.5)):
        updates, opt_state = tx.update(jnp.array(grad, jnp.float32), opt_state)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(params, expected, rtol=1e-4, atol=1e-5)
    assert not anneal_lr or not updates.any()


def test_first_gradients_of_small_size_move_by_less_than_the_rate():
    tx = ppo_eqx.make_optimizer(ppo_eqx.Args(anneal_lr=False, learning_rate=1.0))
    updates, _ = tx.update(jnp.array([1e-5]), tx.init(jnp.zeros(1)))
    np.testing.assert_allclose(updates, -0.5, rtol=1e-3)


# Rollout


FINFO = np.finfo(np.float32)
LOGITS = [[0.1, -0.3, 0.7], [80.0, -90.0, 0.0], [1.0, 2.0, FINFO.min]]


@pytest.mark.parametrize("logits", LOGITS)
@pytest.mark.parametrize("action", [0, 1, 2])
def test_log_prob_and_entropy_in_float64(logits, action):
    logits = np.array(logits, np.float32)
    exact = np.longdouble(logits) - scipy.special.logsumexp(np.float64(logits))
    probs = np.exp(np.maximum(exact, -2000))
    log_prob, entropy = ppo_eqx.log_prob_and_entropy(logits, jnp.array(action))
    np.testing.assert_allclose(
        log_prob, np.float32(exact[action]), rtol=1e-6, atol=1e-6
    )
    expected = -np.sum(probs * np.maximum(exact, -2000))
    np.testing.assert_allclose(entropy, float(expected), rtol=1e-5, atol=1e-6)
    # d log p_a / dx = 1_a - p and dH / dx = -p (log p + H).
    gradient = jax.jacobian(ppo_eqx.log_prob_and_entropy)(logits, jnp.array(action))
    expected_entropy = -probs * (np.maximum(exact, -2000) + expected)
    np.testing.assert_allclose(gradient[0], np.eye(3)[action] - probs, atol=1e-6)
    np.testing.assert_allclose(gradient[1], np.float64(expected_entropy), atol=1e-6)


def test_log_prob_and_entropy_take_any_leading_axes():
    logits = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    action = np.array([[0, 1, 2, 1, 0], [2, 2, 0, 0, 1]])
    log_prob, entropy = ppo_eqx.log_prob_and_entropy(logits, action)
    assert log_prob.shape == entropy.shape == (2, 5)
    one = ppo_eqx.log_prob_and_entropy(logits[1, 3], action[1, 3])
    np.testing.assert_allclose((log_prob[1, 3], entropy[1, 3]), one, rtol=1e-6)


@functools.cache
def probe_rollout(ppo):
    """First obs, last state and steps of 64 x 256 in the probe, action 0 preferred."""
    args = ppo.Args(num_envs=256, num_steps=64)
    rows = jnp.array([[0.0, -1.5, 3.0]] * 2)
    train_state = table_state(ppo, rows, optax.sgd(1.0))
    keys = jax.random.split(jax.random.key(0), args.num_envs)
    obs, env_state = ppo.reset(PROBE, keys)
    state = ppo.RunnerState(train_state, env_state, obs, jax.random.key(1))
    rollout = jax.jit(ppo.rollout, static_argnums=(1, 2))
    return (obs, *jax.device_get(rollout(state, PROBE, args)))


@both
def test_actions_are_samples_of_the_policy(ppo):
    _, _, steps = probe_rollout(ppo)
    expected = 1 / (1 + np.exp(1.5))
    assert abs(steps.action.mean() - expected) < 4 * (0.25 / steps.action.size) ** 0.5
    # Neither environments nor steps repeat one another.
    assert len({tuple(x) for x in steps.action}) == len(steps.action)
    assert len({tuple(x) for x in steps.action.T}) == steps.action.shape[1]
    np.testing.assert_allclose(
        steps.log_prob,
        np.log(np.where(steps.action, expected, 1 - expected)),
        rtol=1e-5,
    )


@both
def test_next_obs_is_what_the_step_led_to_and_obs_what_it_started_from(ppo):
    first_obs, state, steps = probe_rollout(ppo)
    room, next_room = steps.obs.argmax(-1), steps.next_obs.argmax(-1)
    np.testing.assert_array_equal(steps.obs[0], first_obs)
    np.testing.assert_array_equal(next_room, np.where(room == Probe.DELAYED, 2, room))
    # Afterwards it goes on there, or in a room to start in.
    after = np.concatenate([room[1:], state.obs.argmax(-1)[None]])
    np.testing.assert_array_equal(after[~steps.done], next_room[~steps.done])
    assert set(after[steps.done]) == set(Probe.STARTS)
    np.testing.assert_array_equal(steps.done, room != Probe.DELAYED)
    np.testing.assert_array_equal(steps.terminated, steps.done & (room != Probe.CUT))
    reward = np.array(Probe.REWARDS)[room, steps.action]
    np.testing.assert_array_equal(steps.reward, reward)
    # No room gives anything before its last step.
    np.testing.assert_array_equal(steps.episode_return[steps.done], reward[steps.done])


# Advantages


def test_gae_by_hand():
    # gamma = lambda = 0.5; two environments, three steps; the second is done at step 1.
    reward = np.array([[1.0, 1], [1, 1], [1, 1]])
    value = np.array([[2.0, 2], [2, 2], [2, 2]])
    next_value = np.array([[2.0, 2], [2, 0], [4, 2]])
    done = np.array([[False, False], [False, True], [False, False]])
    # delta: 1 + 0.5 * 2 - 2 = 0, at the end -1, and 1 + 0.5 * 4 - 2 = 1.
    expected = np.array([[0.0625, -0.25], [0.25, -1], [1, 0]])
    advantage = ppo_eqx.compute_gae(reward, value, next_value, done, 0.5, 0.5)
    np.testing.assert_array_equal(advantage, expected)


T, N = 6, 3
numbers = hnp.arrays(np.float32, (T, N), elements=st.floats(-8, 8, width=16))
ends = hnp.arrays(bool, (T, N))
unit = st.floats(0, 1, width=16)
jitted_gae = jax.jit(ppo_eqx.compute_gae)
laws = settings(max_examples=40, deadline=None, derandomize=True)


@laws
@given(numbers, numbers, numbers, ends, unit, unit)
def test_gae_is_the_double_sum_of_equation_16(reward, value, next_value, done, g, lam):
    deltas = np.float64(reward) + g * np.float64(next_value) - value
    expected = np.zeros((T, N))
    for env in range(N):
        for t in range(T):
            for k in range(t, T):
                expected[t, env] += (g * lam) ** (k - t) * deltas[k, env]
                if done[k, env]:
                    break
    advantage = jitted_gae(reward, value, next_value, done, g, lam)
    np.testing.assert_allclose(advantage, expected, rtol=1e-4, atol=1e-4)


@laws
@given(numbers, numbers, numbers, ends, unit)
def test_gae_with_lambda_0_is_delta(reward, value, next_value, done, gamma):
    advantage = jitted_gae(reward, value, next_value, done, gamma, 0.0)
    np.testing.assert_allclose(
        advantage, reward + gamma * next_value - value, atol=1e-5
    )


@laws
@given(numbers, hnp.arrays(np.float32, (T + 1, N), elements=st.floats(-8, 8, width=16)),
       unit)  # fmt: skip
def test_gae_with_lambda_1_is_the_discounted_sum_minus_the_value(reward, values, gamma):
    advantage = jitted_gae(
        reward, values[:-1], values[1:], np.zeros((T, N), bool), gamma, 1.0
    )
    powers = np.float64(gamma) ** np.arange(T)
    for t in range(T):
        discounted = powers[: T - t] @ reward[t:] + gamma ** (T - t) * values[-1]
        np.testing.assert_allclose(advantage[t], discounted - values[t], atol=1e-3)


@laws
@given(numbers, numbers, numbers, ends, unit, unit, st.integers(0, T - 2))
def test_an_end_cuts_the_past_from_the_future(
    reward, value, next_value, done, g, lam, t
):
    done[t, 1] = True
    before = jitted_gae(reward, value, next_value, done, g, lam)
    for x in (reward, value, next_value):
        x[t + 1 :, 1] += 3.0  # in the future, and in environment 1 alone
    after = np.array(jitted_gae(reward, value, next_value, done, g, lam))
    np.testing.assert_array_equal(after[: t + 1], before[: t + 1])
    np.testing.assert_array_equal(after[:, [0, 2]], np.array(before)[:, [0, 2]])


@both
@pytest.mark.parametrize("bootstrap", [True, False])
def test_batch_bootstraps_at_time_limits_and_not_at_failures(ppo, bootstrap):
    # A state's value is its number. Columns: goes on, terminates, is cut at step 0.
    obs = np.array([[[1.0], [2], [3]], [[4], [5], [6]]], np.float32)
    next_obs = np.array([[[4.0], [70], [80]], [[9], [10], [11]]], np.float32)
    terminated = np.array([[False, True, False], [False, False, False]])
    done = np.array([[False, True, True], [False, False, False]])
    reward, action = np.ones((2, 3), np.float32), np.arange(6).reshape(2, 3)
    log_prob = -np.arange(6.0).reshape(2, 3)
    steps = ppo.Transition(
        obs, action, log_prob, reward, next_obs, terminated, done, reward
    )
    args = ppo.Args(gamma=0.5, gae_lambda=0.5, bootstrap_truncated=bootstrap)
    network = lambda obs: (obs, obs[..., 0])
    batch = ppo.make_batch(*as_network(ppo, network), steps, args)
    last = np.array([1 + 4.5 - 4, 1 + 5 - 5, 1 + 5.5 - 6])
    at_limit = 1 + 40 * bootstrap - 3
    first = np.array([1 + 2 - 1 + 0.25 * last[0], 1 - 2, at_limit])
    advantage = np.concatenate([first, last])
    np.testing.assert_allclose(batch.advantage, advantage, rtol=1e-6)
    np.testing.assert_allclose(batch.target, advantage + obs.reshape(-1), rtol=1e-6)
    np.testing.assert_array_equal(batch.value, obs.reshape(-1))
    # Samples stay together.
    np.testing.assert_array_equal(batch.obs, obs.reshape(6, 1))
    np.testing.assert_array_equal(batch.action, np.arange(6))
    np.testing.assert_array_equal(batch.log_prob, -np.arange(6.0))


# Loss


def loss_of(ppo, logits, value, batch, **flags):
    """Loss and metrics where the network gives these logits (B, A) and values (B,)."""
    args = ppo.Args(**flags)
    rows = np.concatenate([np.array(logits), np.array(value)[:, None]], axis=1)
    rows = jnp.asarray(rows)
    look_up = lambda obs: (
        rows[obs[..., 0].astype(int), :-1],
        rows[obs[..., 0].astype(int), -1],
    )
    loss = jax.jit(lambda batch: ppo.ppo_loss(*as_network(ppo, look_up), batch, args))
    return loss(batch)


@functools.cache
def sample_batch(ppo, size=16):
    """Logits (B, 3), values (B,) and a batch that a policy near by has recorded."""
    rng = np.random.default_rng(0)
    logits, value = rng.normal(size=(size, 3)), rng.normal(size=size)
    action = rng.integers(3, size=size)
    log_prob = scipy.special.log_softmax(logits, axis=1)[np.arange(size), action]
    old_value, advantage, target = rng.normal(size=(3, size))
    batch = ppo.Batch(
        np.arange(size)[:, None], action, log_prob, old_value, advantage, target
    )
    return jax.tree.map(jnp.asarray, (logits, value, batch))


@both
def test_ratio_is_one_on_the_policy_of_the_batch(ppo):
    logits, value, batch = sample_batch(ppo)
    _, metrics = loss_of(ppo, logits, value, batch, norm_adv=False)
    assert abs(metrics["approx_kl"]) < 1e-6 and metrics["clip_fraction"] == 0
    np.testing.assert_allclose(
        metrics["policy_loss"], -batch.advantage.mean(), rtol=1e-5
    )


@both
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.1, 2.0])
def test_policy_is_clipped_for_both_signs_of_the_advantage(ppo, ratio, advantage):
    batch = ppo.Batch(
        *(jnp.array([x]) for x in ([0], 0, np.log(0.4), 0.0, advantage, 0.0))
    )
    chance = 0.4 * ratio
    logits = [[np.log(chance), np.log(1 - chance)]]
    _, metrics = loss_of(ppo, logits, [0.0], batch, norm_adv=False)
    expected = -min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    np.testing.assert_allclose(metrics["policy_loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(
        metrics["approx_kl"], ratio - 1 - np.log(ratio), rtol=1e-4
    )
    assert metrics["clip_fraction"] == (abs(ratio - 1) > 0.2)


@both
@pytest.mark.parametrize(
    "value, old, target, clipped, unclipped",
    [(1.0, 0.0, 2.0, 1.62, 0.5), (1.0, 0.0, 0.1, 0.405, 0.405),
     (0.1, 0.0, 1.0, 0.405, 0.405)],
)  # fmt: skip
def test_value_is_clipped_to_the_larger_error(
    ppo, value, old, target, clipped, unclipped
):
    batch = ppo.Batch(
        *(jnp.array([x]) for x in ([0], 0, np.log(0.5), old, 0.0, target))
    )
    for clip_vloss, expected in ((True, clipped), (False, unclipped)):
        flags = dict(norm_adv=False, clip_vloss=clip_vloss)
        _, metrics = loss_of(ppo, [[0.0, 0.0]], [value], batch, **flags)
        np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-5)


@both
def test_loss_is_the_weighted_sum_of_its_parts(ppo):
    logits, value, batch = sample_batch(ppo)
    loss, metrics = loss_of(ppo, logits, value, batch, ent_coef=0.25, vf_coef=0.75)
    assert loss == metrics["loss"]
    probs = scipy.special.softmax(np.float64(logits), axis=1)
    entropy = -(probs * np.log(probs)).sum(1).mean()
    np.testing.assert_allclose(metrics["entropy"], entropy, rtol=1e-5)
    expected = metrics["policy_loss"] - 0.25 * entropy + 0.75 * metrics["value_loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


@both
def test_normalized_advantages_have_no_scale_and_no_offset(ppo):
    logits, value, batch = sample_batch(ppo)
    other = batch._replace(advantage=5 * batch.advantage + 3)
    # Against another policy, as an offset is nothing where all ratios are 1.
    a, b = (
        loss_of(ppo, 2 * logits, value, x)[1]["policy_loss"] for x in (batch, other)
    )
    np.testing.assert_allclose(a, b, rtol=1e-4)
    a, b = (
        loss_of(ppo, 2 * logits, value, x, norm_adv=False)[1]["policy_loss"]
        for x in (batch, other)
    )
    assert abs(a - b) > 0.1


# Update


def recorder(num_steps):
    """Optimizer that changes nothing and keeps all gradients in its state."""

    def init(params):
        zeros = lambda x: jnp.zeros((num_steps, *x.shape))
        return jnp.array(0), jax.tree.map(zeros, params)

    def update(grads, state, params):
        count, seen = state
        seen = jax.tree.map(lambda x, grad: x.at[count].set(grad), seen, grads)
        return jax.tree.map(jnp.zeros_like, grads), (count + 1, seen)

    return optax.GradientTransformation(init, update)


@both
def test_each_sample_is_used_once_per_epoch_in_another_order_each_time(ppo):
    # The gradient of a table shows which of its rows, one a sample, are in a minibatch.
    args = ppo.Args(num_steps=16, update_epochs=3, norm_adv=False, clip_vloss=False)
    size, rng = args.batch_size, np.random.default_rng(0)
    action, target = rng.integers(2, size=size), 1.0 + np.arange(size)
    log_prob, advantage = np.full(size, np.log(0.5)), np.ones(size)
    batch = ppo.Batch(
        np.arange(size)[:, None], action, log_prob, 0 * target, advantage, target
    )
    train_state = table_state(ppo, jnp.zeros((size, 3)), recorder(12))
    update = jax.jit(ppo.update, static_argnums=3)
    after, _ = update(
        train_state, jax.tree.map(jnp.asarray, batch), jax.random.key(0), args
    )
    (grads,) = jax.tree.leaves(after.opt_state[1])
    used = grads[..., -1] != 0
    np.testing.assert_array_equal(used.sum(axis=1), 16)
    np.testing.assert_array_equal(used.reshape(3, 4, size).sum(axis=1), 1)
    epochs = used.reshape(3, 4, size)
    assert (epochs[0] != epochs[1]).any() and (epochs[1] != epochs[2]).any()
    assert (epochs[0] != epochs[2]).any()
    # Each with its own target and action: the loss falls towards what was recorded.
    np.testing.assert_allclose(
        grads[..., -1].sum(axis=0), -3 * 0.5 * target / 16, rtol=1e-5
    )
    better = (-grads[..., :2].sum(axis=0)).argmax(axis=1)
    np.testing.assert_array_equal(better, action)


@both
def test_metrics_of_an_update_are_means_over_its_minibatches(ppo):
    # Values stay 0: the value losses are half the squares of the targets.
    args = ppo.Args(num_steps=16, norm_adv=False, clip_vloss=False)
    size = args.batch_size
    target, zeros = jnp.arange(1.0 * size), jnp.zeros(size)
    batch = ppo.Batch(
        jnp.zeros((size, 1)), zeros.astype(int), zeros, zeros, zeros, target
    )
    train_state = table_state(ppo, jnp.zeros((1, 3)), recorder(16))
    update = jax.jit(ppo.update, static_argnums=3)
    _, metrics = update(train_state, batch, jax.random.key(0), args)
    expected = 0.5 * np.mean(np.square(target))
    np.testing.assert_allclose(metrics["value_loss"], expected, rtol=1e-5)


# Training


@functools.cache
def probe_trained(ppo):
    """Logits and values of the probe's rooms, after training, and the last metrics."""
    args = ppo.Args(
        num_envs=64, num_steps=8, total_timesteps=80 * 512, learning_rate=5e-3,
        gamma=0.5, ent_coef=0.0, clip_vloss=False,
    )  # fmt: skip
    state, metrics = trained(ppo, args, args.num_iterations, PROBE)
    return *compare.network(state.train_state)(jnp.eye(7)), metrics


VALUES = {
    "reward 1": (0, 1.0),
    "delayed reward": (1, 0.5),
    "delayed reward, second step": (2, 1.0),
    "reward by observation": (3, -1.0),
    "reward by action": (4, 1.0),
    "reward by the other action": (5, 1.0),
    "cut by a time limit: 1 + 0.5 V = V": (6, 2.0),
}


@both
@pytest.mark.parametrize("room, expected", VALUES.values(), ids=VALUES.keys())
def test_critic_finds_the_known_value(ppo, room, expected):
    assert abs(probe_trained(ppo)[1][room] - expected) < 0.1


@both
def test_policy_finds_the_action_that_pays(ppo):
    logits, _, metrics = probe_trained(ppo)
    probs = jax.nn.softmax(logits)
    assert probs[4, 1] > 0.95 and probs[5, 0] > 0.95
    assert (
        metrics["episode_return"][-1] > 0.55
    )  # of 2 / 3 at best, as the rooms come up


@both
def test_evaluation_returns_the_first_episode_of_each_environment(ppo):
    args = ppo.Args(eval_episodes=200, num_steps=2)
    rows = jnp.array([[0.0, 1.0, 0.0]] * 2)
    train_state = table_state(ppo, rows, optax.sgd(1.0))
    key = jax.random.key(5)
    evaluate = jax.jit(ppo.evaluate, static_argnums=(2, 3))
    greedy, sampled = (
        evaluate(train_state, key, PROBE, args, x) for x in (True, False)
    )
    obs, _ = ppo.reset(PROBE, jax.random.split(jax.random.split(key)[0], 200))
    room = obs.argmax(-1)
    best = np.array(Probe.REWARDS)[:, 1]
    best[Probe.DELAYED] = 1.0
    np.testing.assert_array_equal(greedy, best[room])
    # Sampled, only the rooms in which the action counts may differ, and some do.
    differs = np.asarray(sampled != greedy)
    assert differs.any() and set(np.asarray(room)[differs]) == {4, 5}


class Endless(Probe):
    def is_truncated(self, state, params):
        return jnp.array(False)


def test_evaluation_of_an_episode_without_end_is_nan():
    env = LogWrapper(FlattenObservationWrapper(Endless()))
    args = ppo_eqx.Args(eval_episodes=50)
    train_state = table_state(ppo_eqx, jnp.zeros((2, 3)), optax.sgd(1.0))
    evaluate = jax.jit(ppo_eqx.evaluate, static_argnums=(2, 3))
    returns = evaluate(train_state, jax.random.key(0), env, args, True)
    assert 0 < np.isnan(returns).sum() < 50


@slow
@both
def test_rate_ends_at_zero_with_the_last_gradient_step(ppo):
    args = small(ppo)
    train_state = trained(ppo, args, args.num_iterations)[0].train_state
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    counts = optax.tree_utils.tree_get_all_with_path(train_state.opt_state, "count")
    assert [int(count) for _, count in counts] == [steps, steps]  # Adam, schedule
    params = compare.params_of(train_state)
    grads = jax.tree.map(jnp.ones_like, params)
    after = train_state.apply_gradients(grads=grads)
    assert_same_bits(compare.params_of(after), params)


@slow
@both
def test_same_seed_same_bits_also_in_chunks_and_another_seed_compiles_nothing(ppo):
    traces = []

    def counted(runner_state, args, num_iterations):
        traces.append(num_iterations)
        return ppo.train(runner_state, CARTPOLE, args, num_iterations)

    train = jax.jit(counted, static_argnums=(1, 2))
    state, metrics = trained(ppo, small(ppo), 8)
    part, parts = start(ppo, small(ppo)), []
    for size in (3, 3, 2):
        part, chunk = train(part, small(ppo, num_reports=3), size)
        parts.append(chunk)
    assert_same_bits(jax.tree.map(lambda *x: jnp.concatenate(x), *parts), metrics)
    params = [compare.params_of(x.train_state) for x in (state, part)]
    assert_same_bits(*params)
    other, _ = train(
        start(ppo, small(ppo), seed=2), small(ppo, seed=2, num_reports=3), 3
    )
    assert traces == [3, 2]
    assert (np.asarray(other.obs) != np.asarray(part.obs)).any()
    assert_same_bits(
        train(start(ppo, small(ppo)), small(ppo, num_reports=3), 3)[1], parts[0]
    )


@slow
@both
def test_train_states_of_unjitted_inits_can_be_stacked(ppo):
    args = [small(ppo, seed=seed) for seed in (1, 2)]
    states = [ppo.init(jax.random.key(x.seed), CARTPOLE, x).train_state for x in args]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *states)
    first = jax.tree.map(lambda x: x[0], stacked)
    assert_same_bits(compare.params_of(first), compare.params_of(states[0]))


@slow
@both
def test_metrics_are_a_few_numbers_per_iteration(ppo):
    _, metrics = trained(ppo, small(ppo), 8)
    assert {metric.shape for metric in metrics.values()} == {(8,)}
    assert metrics["episodes"][0] > 0
    assert metrics["episode_return"][0] >= metrics["min_return"][0]
    # No episode of Acrobot ends in 4 x 32 steps: its return is not known, and not 0.
    env = ppo.make_env("Acrobot-v1")
    _, metrics = trained(ppo, small(ppo), 1, env)
    assert metrics["episodes"] == 0
    assert np.isnan(metrics["episode_return"]) and np.isnan(metrics["min_return"])


@slow
@both
@pytest.mark.parametrize("env_id", ["MountainCar-v0", "Breakout-MinAtar"])
def test_environments_whose_types_change_or_whose_observations_are_images(ppo, env_id):
    env, args = ppo.make_env(env_id), small(ppo)
    runner_state, metrics = trained(ppo, args, 1, env)
    assert np.isfinite(metrics["loss"]).all()
    size = np.prod(env.observation_space(env.default_params).shape)
    assert runner_state.obs.shape == (4, size)


@slow
@both
def test_three_seeds_learn(ppo):
    args = ppo.Args()
    train = jax.jit(ppo.train, static_argnums=(1, 2, 3))
    states = [start(ppo, args, seed=seed) for seed in (1, 2, 3)]
    lowered = train.lower(states[0], CARTPOLE, args, args.num_iterations)
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lowered.compile(), states))
    tenth = args.num_iterations // 10
    for _, metrics in results:
        assert np.nanmean(metrics["episode_return"][-tenth:]) >= 475


# Command line


def readme_block(start):
    """The code block of the README that starts so."""
    (block,) = re.findall(rf"^```python\n({start}.*?)^```", README, re.M | re.S)
    return block


LOADS = {
    ppo_eqx: ("policy.eqx", "import equinox as eqx, jax", ("4, 2,", "4, 3,", "6, 2,")),
    ppo_flax: ("policy.msgpack", "import flax", ("=2", "=3", "=2")),
}


def load_lines_of_the_readme(ppo):
    """Run the README's lines on a file in this folder; other sizes must be refused."""
    _, first_words, (right, *wrong) = LOADS[ppo]
    lines = readme_block(first_words)
    names = {}
    exec(lines, names)
    assert names["action"] in (0, 1)
    assert right in lines
    for size in wrong:
        changed = lines.replace(right, size)
        if size == right:
            changed = lines.replace("zeros(4)", "zeros(6)")
        with pytest.raises((RuntimeError, flax.errors.ScopeParamShapeError)):
            exec(changed, {})


@slow
@pytest.mark.parametrize(
    "flags, rows, last",
    [
        ("--total-timesteps 24064 --num-reports 30", 24, 24064),
        ("--total-timesteps 1000", 1, 512),
    ],
)
def test_every_step_is_trained_and_reported(flags, rows, last, capsys):
    flags += " --eval-episodes 2 --env-id Acrobot-v1"
    ppo_eqx.main(tyro.cli(ppo_eqx.Args, args=flags.split()))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith(f": {last} environment steps") for line in lines)
    table = [line.split() for line in lines if re.match(r" *\d+ +[-\d]", line)]
    table = [line for line in table if len(line) == 9]
    assert len(table) == rows and int(table[-1][0]) == last
    # Episodes of Acrobot take up to 500 steps: in the first report none has ended.
    assert table[0][1:3] == ["-", "-"]
    assert any(line.startswith("2 greedy episodes: return -") for line in lines)


@slow
@both
def test_run_prints_learns_and_saves_what_the_readme_loads(
    ppo, capsys, monkeypatch, tmp_path
):
    name = "policy.eqx" if ppo is ppo_eqx else "policy.msgpack"
    monkeypatch.chdir(tmp_path)
    ppo.main(ppo.Args(save_path=Path(name)))
    lines = capsys.readouterr().out.splitlines()
    assert any(re.search(r"init and compile [\d.]+ s", line) for line in lines)
    assert any(re.match(r"run .* s, \d+ environment steps/s", line) for line in lines)
    for kind in ("greedy", "sampled"):
        (line,) = [x for x in lines if x.startswith(f"100 {kind} episodes: return ")]
        assert float(line.split()[4]) > 450
    assert [file.name for file in tmp_path.iterdir()] == [name]
    load_lines_of_the_readme(ppo)


@slow
@both
def test_runs_in_x64_with_key_reuse_and_warnings_as_errors(ppo):
    env = {"JAX_DEBUG_KEY_REUSE": "1", "JAX_ENABLE_X64": "1"}
    flags = "--total-timesteps 1024 --num-reports 2 --eval-episodes 3".split()
    result = run_script(ppo, *flags, env=env)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert "3 sampled episodes: return" in result.stdout


@slow
def test_interrupt_ends_with_one_line():
    command = "import ppo_eqx, runpy, tyro\ndef cli(_): raise KeyboardInterrupt\n"
    command += "tyro.cli = cli\nrunpy.run_path('ppo_eqx.py', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, cwd=FOLDER
    )
    assert (result.returncode, result.stderr) == (1, "interrupted\n")


@slow
@both
def test_every_parameter_is_float64_under_x64(ppo):
    with jax.enable_x64(True):
        init = jax.jit(ppo.init, static_argnums=(1, 2))
        state = init(jax.random.key(1), CARTPOLE, small(ppo))
    dtypes = {x.dtype for x in jax.tree.leaves(compare.params_of(state.train_state))}
    assert dtypes == {jnp.dtype("float64")}


# The two trainings agree


def shared_start():
    """Arguments and runner states of both scripts with Equinox's initial weights."""
    args = small(ppo_eqx)
    eqx_state, flax_state = start(ppo_eqx, args), start(ppo_flax, small(ppo_flax))
    params = compare.flax_layout(eqx_state.train_state.model)
    shapes = jax.tree.map(jnp.shape, flax_state.train_state.params)
    assert jax.tree.map(jnp.shape, params) == shapes
    train_state = flax_state.train_state.replace(params=params)
    return args, eqx_state, flax_state._replace(train_state=train_state)


def test_same_keys_and_environments_in_both_scripts():
    _, eqx_state, flax_state = shared_start()
    assert_same_bits(eqx_state.obs, flax_state.obs)
    data = (jax.random.key_data(state.key) for state in (eqx_state, flax_state))
    assert_same_bits(*data)


def test_same_weights_give_the_same_outputs_loss_and_gradients():
    args, *states = shared_start()
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(64, 4)), rng.integers(0, 2, 64)
    log_prob, value, advantage, target = rng.normal(size=(4, 64))
    batch = ppo_eqx.Batch(obs, action, 0.1 * log_prob - 0.7, value, advantage, target)
    batch = jax.tree.map(jnp.asarray, batch)
    results = []
    for state in states:
        loss_and_grads = jax.jit(compare.loss_and_grads, static_argnums=2)
        loss, _, grads = loss_and_grads(state.train_state, batch, args)
        outputs = compare.network(state.train_state)(batch.obs)
        results.append((*outputs, loss, compare.flax_layout(grads)))
    for x, y in zip(*map(jax.tree.leaves, results)):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


# Comparison: what compare.py claims


def short(**kwargs):
    """Arguments of a short comparison: 20 iterations of 4 x 32 steps, large updates."""
    defaults = dict(num_steps=32, total_timesteps=2560, num_reports=2, eval_episodes=3)
    return compare.Args(**defaults | dict(learning_rate=1e-2, num_seeds=3) | kwargs)


@functools.cache
def result(variant):
    """What compare.run returns for three seeds: one device has to take an extra one."""
    return compare.run(variant, short())


@functools.cache
def results():
    return {variant: result(variant) for variant in compare.COLORS}


@slow
def test_flax_order_is_flax_bit_for_bit_over_all_seeds():
    assert_same_bits(result("flax")["metrics"], result("equinox-flax-order")["metrics"])
    assert_same_bits(result("flax")["params"], result("equinox-flax-order")["params"])
    assert "is flax bit for bit" in compare.verdict(short(), results())
    other = [result(x)["metrics"] for x in ("flax", "equinox")]
    assert compare.first_difference(*other, ["loss"]) != "none"
    # And it is said if it is not so.
    other = result("flax") | dict(params=result("equinox")["params"])
    assert "NOT" in compare.verdict(short(), results() | {"flax": other})
    other = result("flax") | dict(metrics=result("equinox")["metrics"])
    assert "NOT" in compare.verdict(short(), results() | {"flax": other})


@slow
def test_a_lane_is_the_script_alone_bit_for_bit():
    assert result("equinox")["metrics"]["loss"].shape == (3, 20)
    args = small(ppo_eqx, total_timesteps=2560, eval_episodes=3)
    train = jax.jit(ppo_eqx.train, static_argnums=(1, 2, 3))
    for lane, seed in enumerate((1, 2, 3)):
        state, metrics = train(start(ppo_eqx, args, seed=seed), CARTPOLE, args, 20)
        params = compare.flax_layout(state.train_state.model)
        at_lane = lambda tree, lane=lane: jax.tree.map(lambda x: x[lane], tree)
        assert_same_bits(metrics, at_lane(result("equinox")["metrics"]))
        assert_same_bits(params, at_lane(result("equinox")["params"]))
    evaluate = jax.jit(ppo_eqx.evaluate, static_argnums=(2, 3))
    for name, key in zip(("greedy", "sampled"), jax.random.split(state.key)):
        returns = evaluate(state.train_state, key, CARTPOLE, args, name == "greedy")
        assert_same_bits(returns, result("equinox")[name][lane])


@slow
def test_only_the_bug_loses_the_state_of_adam():
    for variant in compare.COLORS:
        opt_state = result(variant)["opt_state"]
        counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
        expected = 0 if variant == "equinox-no-opt-state" else 20 * 4 * 4
        assert len(counts) == 2
        for _, count in counts:
            np.testing.assert_array_equal(count, np.full(3, expected))


@slow
def test_seeds_start_from_the_same_weights():
    args = short()
    for seed in (1, 2):
        states = [compare.init(jax.random.key(seed), x, args) for x in compare.COLORS]
        params = [compare.params_of(state.train_state) for state in states]
        weights = [compare.flax_layout(x) for x in params]
        for state, other in zip(states, weights):
            assert_same_bits(other, weights[0])
            assert_same_bits(state.obs, states[0].obs)


@slow
def test_csv_reads_back_to_the_same_bits():
    metrics = {variant: result(variant)["metrics"] for variant in compare.COLORS}
    text = compare.to_csv(short(), metrics)
    read, steps_per_iteration = compare.from_csv(text)
    assert steps_per_iteration == 128 and list(read) == list(metrics)
    assert ",,," in text and "nan" not in text  # an iteration without an episode
    for variant, columns in metrics.items():
        for name, x in columns.items():
            assert_same_bits(read[variant][name].astype(x.dtype), x)
    # So the claim can be checked from the file alone.
    lines = text.splitlines()
    rows = {
        v: [x.partition(",")[2] for x in lines if x.startswith(f"{v},")] for v in read
    }
    assert rows["flax"] == rows["equinox-flax-order"] != rows["equinox"]


@slow
def test_results_table():
    # Episodes of 500 only: locked, never below. And one dip in the last iteration.
    metrics = {name: np.ones((3, 20)) for name in compare.METRICS}
    metrics |= dict.fromkeys(["episode_return", "min_return"], np.full((3, 20), 500.0))
    metrics["min_return"] = metrics["min_return"].copy()
    metrics["min_return"][:, 9] = 10.0
    for dips, locked, last_dip in ((1, "2/3", "1280"), (2, "1/3", "never")):
        metrics["min_return"][:dips, 19] = 9.0
        results = {"flax": result("flax") | dict(metrics=metrics)}
        line = compare.results_table(short(), results).splitlines()[2]
        cells = [x.strip() for x in line.strip("|").split("|")]
        assert cells[1:4] == ["500.0 (500.0 to 500.0)", locked, "9"]
        assert cells[4:6] == ["128", last_dip]


def run_main(monkeypatch, folder, stop_at=None):
    """Run compare.main on results that are there, until Ctrl-C at some variant."""
    results()

    def run(variant, args):
        if variant == stop_at:
            raise KeyboardInterrupt
        return result(variant)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.delenv("DISPLAY", raising=False)
    with pytest.raises(SystemExit) as exit_info:
        compare.main(short(output_dir=folder))
    return exit_info.value.code


@slow
def test_comparison_writes_csv_tables_and_figure(monkeypatch, tmp_path, capsys):
    folder = tmp_path / "new" / "folder"
    assert run_main(monkeypatch, folder) == 0
    names = ["compare.png", "returns.csv", "summary.md"]
    assert sorted(path.name for path in folder.iterdir()) == names
    out = capsys.readouterr().out
    assert (folder / "summary.md").read_text() in out
    for words in ("jax 0.", " cores", "| variant |", "bit for bit", "the same bits"):
        assert words in out
    rungs = out.partition("| seed 1 |")[2].splitlines()[2:-1]
    rungs = [[x.strip() for x in line.strip("|").split("|")] for line in rungs if line]
    assert len(rungs) == len(compare.RUNGS) + 2
    assert {same for _, _, same in rungs} == {"0", "none"}
    different = {name: different for name, different, _ in rungs}
    assert different["initial weights"] == "0"
    assert float(different["parameters at the end"]) > 0
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    # A folder in use is refused, and nothing in it changes.
    before = {path: path.read_bytes() for path in folder.iterdir()}
    message = run_main(monkeypatch, folder)
    assert message == f"--output-dir: File exists: {folder}/returns.csv"
    assert before == {path: path.read_bytes() for path in folder.iterdir()}
    (folder / "compare.png").unlink()
    compare.main(short(output_dir=folder, plot_only=True))
    assert (folder / "compare.png").read_bytes() == before[folder / "compare.png"]


@slow
def test_interrupt_leaves_what_has_ended(monkeypatch, tmp_path, capsys):
    code = run_main(monkeypatch, tmp_path, stop_at="equinox")
    assert code == 130
    metrics, _ = compare.from_csv((tmp_path / "returns.csv").read_text())
    assert list(metrics) == ["flax"]
    assert "| flax |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "interrupted" in capsys.readouterr().err


@slow
def test_two_processes_write_what_one_writes(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = "--num-steps 32 --total-timesteps 2560 --num-reports 2 --eval-episodes 3"
    flags += (
        f" --learning-rate 1e-2 --num-seeds 3 --variants flax --output-dir {tmp_path}"
    )
    flags += f" --coordinator-address {address} --num-processes 2 --process-id"
    command = [sys.executable, "compare.py", *flags.split()]
    processes = [subprocess.Popen([*command, i], cwd=FOLDER) for i in "01"]
    try:
        assert [process.wait(timeout=120) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    expected = compare.to_csv(short(), {"flax": result("flax")["metrics"]})
    assert (tmp_path / "returns.csv").read_text() == expected


@slow
def test_x64_comparison_of_the_command_line(tmp_path):
    flags = "--num-steps 32 --total-timesteps 1024 --num-reports 2 --eval-episodes 2"
    flags += " --num-seeds 3 --variants flax equinox-flax-order --output-dir"
    command = [sys.executable, "compare.py", *flags.split(), str(tmp_path)]
    env = os.environ | {"JAX_ENABLE_X64": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=FOLDER)
    assert done.returncode == 0, done.stderr
    assert "flax (1 of 2): iteration 8 of 8" in done.stderr
    assert "is flax bit for bit, for all 3 seeds" in done.stdout
    metrics, _ = compare.from_csv((tmp_path / "returns.csv").read_text())
    assert_same_bits(metrics["flax"], metrics["equinox-flax-order"])
    assert (metrics["flax"]["loss"] != metrics["flax"]["loss"].astype(np.float32)).any()


BAD_COMPARE_FLAGS = {
    "--num-seeds 0": "--num-seeds must be from 1",
    "--num-seeds 2 --seed 4294967295": "--num-seeds must be from 1",
    "--gamma 2": "--gamma must be from 0 to 1",
    "--variants haiku": "'equinox-flax-order'",
    "--variants": "--variants needs at least one, and each only once",
    "--variants flax flax": "--variants needs at least one, and each only once",
    "--plot-only": "--plot-only needs the --output-dir",
    "--save-path policy": "--save-path",
    "--num-processes 2": "go together",
    "--coordinator-address localhost:1 --process-id 0": "go together",
    "--coordinator-address localhost:1 --num-processes 2 --process-id 2": "from 0 to",
    "--coordinator-address host --num-processes 2 --process-id 0": "HOST:PORT",
}


@pytest.mark.parametrize("flags", BAD_COMPARE_FLAGS)
def test_bad_input_of_compare_is_refused_in_one_message(flags, capsys):
    with pytest.raises(SystemExit) as exit_info:
        tyro.cli(compare.Args, args=flags.split())
    assert exit_info.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert BAD_COMPARE_FLAGS[flags] in shown


@slow
def test_distributed_flags_are_checked_before_anything_starts():
    command = [sys.executable, "compare.py", "--num-processes", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER)
    assert done.returncode == 2 and "go together" in done.stderr
    assert "Traceback" not in done.stderr and not done.stdout


def test_every_flag_of_compare_has_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        tyro.cli(compare.Args, args=["--help"])
    shown = capsys.readouterr().out
    for field in dataclasses.fields(compare.Args):
        flag = "--" + field.name.replace("_", "-")
        assert (flag in shown) == (field.name != "save_path")
    for words in (
        "of a Slurm, MPI or TPU job",
        "seeds from --seed on",
        "discount factor",
    ):
        assert words in shown


def test_output_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(SystemExit, match="--output-dir: (File exists|Not a dir)"):
            compare.new_folder(short(output_dir=folder))


@slow
def test_csv_that_is_not_ours_or_cut_off_is_refused(tmp_path):
    args = short(output_dir=tmp_path, plot_only=True)
    with pytest.raises(SystemExit, match="No such file"):
        compare.main(args)
    metrics = {variant: result(variant)["metrics"] for variant in ("flax", "equinox")}
    text = compare.to_csv(short(), metrics)
    lines = text.splitlines(keepends=True)
    for bad, message in (
        ("", "not written by"),
        ("a,b\n1,2\n", "not written by"),
        (text.replace("equinox", "haiku"), "not written by"),
        (lines[0], "empty or cut off"),
        (text[:-1], "empty or cut off"),
        (text[:-9], "empty or cut off"),
        ("".join(lines[:-1]), "empty or cut off"),
        ("".join(lines[:5] + lines[6:]), "empty or cut off"),
        (lines[0] + "flax,1,0,128" + ",x" * 9 + "\n", "could not convert"),
        ("".join(lines[:-1]) + "equinox\n", "empty or cut off"),
    ):
        (tmp_path / "returns.csv").write_text(bad)
        with pytest.raises(SystemExit, match=message):
            compare.main(args)
        assert not (tmp_path / "compare.png").exists()


# README


README_CHECKS = re.findall(
    r"^\*\*(\d+)\. (.*?)^```python\n(.*?)\n```", README, re.M | re.S
)


def check_passes(number, names):
    """Run a check of the README on these names."""
    code = {int(n): code for n, _, code in README_CHECKS}[number]
    try:
        exec(code, dict(eqx=ppo_eqx.eqx, jax=jax, jnp=jnp, optax=optax) | names)
    except AssertionError:
        return False
    return True


def test_lines_that_the_readme_quotes_are_in_the_scripts():
    assert len(README_CHECKS) == 12
    source = Path(ppo_eqx.__file__).read_text() + Path(compare.__file__).read_text()
    for number, text, _ in README_CHECKS:
        quoted = re.findall(r"`([^`]+)`", text.partition("Ours")[2])
        assert any(len(line) > 20 and line in source for line in quoted), number


@slow
def test_checks_of_the_readme_flag_the_fault_and_pass_on_the_scripts():
    args = small(ppo_eqx)
    state, _ = trained(ppo_eqx, args, 8)
    before, after = start(ppo_eqx, args).train_state, state.train_state
    model, old_model = after.model, before.model
    found = {}

    def check(number, good, bad):
        found[number] = check_passes(number, good), check_passes(number, good | bad)

    bug = compare.NoOptState(**vars(before))
    grads = jax.tree.map(jnp.ones_like, before.model)
    check(
        1,
        dict(before=before, after=after),
        dict(after=bug.apply_gradients(grads=grads)),
    )

    rollout = jax.jit(ppo_eqx.rollout, static_argnums=(1, 2))
    _, steps = rollout(state, CARTPOLE, args)
    obs, action, log_prob = (
        x.reshape(-1, *x.shape[2:]) for x in (steps.obs, steps.action, steps.log_prob)
    )
    recorded = dict(obs=obs, action=action, log_prob=log_prob)
    check(2, dict(model=model, **recorded), dict(model=old_model))

    mixed = ppo_eqx.eqx.nn.MLP(4, 2, 64, 2, key=jax.random.key(0))  # with functions
    check(3, dict(params=model), dict(params=mixed))
    updates, _ = after.tx.update(grads, after.opt_state, model)
    check(4, dict(params=model, updates=updates), dict(params=mixed))

    default = mixed.layers[1].weight
    check(5, dict(weight=old_model.actor.layers[1].weight), dict(weight=default))

    params = compare.flax_layout(model)
    layers = dict(params["params"]["actor"])
    layers["layers_2"] = layers["layers_2"] | {"kernel": layers["layers_2"]["kernel"].T}
    copied = {"params": params["params"] | {"actor": layers}}
    flax_network = ppo_flax.ActorCritic(num_actions=2, activation="tanh")
    good = dict(model=model, network=flax_network, params=params, obs=obs)
    check(6, good, dict(params=copied))

    _, value = compare.network(after)(obs)
    check(7, dict(value=value, target=jnp.zeros(len(obs))), dict(value=value[:, None]))

    rng = np.random.default_rng(0)
    terminated, truncated = rng.random((2, 40, 5)) < 0.2
    reward, log_prob = rng.normal(size=(2, 40, 5)).astype(np.float32)
    obs, next_obs = rng.normal(size=(2, 40, 5, 4)).astype(np.float32)
    done, action = terminated | truncated, np.zeros((40, 5), int)
    steps = ppo_eqx.Transition(
        obs, action, log_prob, reward, next_obs, terminated, done, reward
    )
    ends = dict(reward=reward, terminated=terminated, truncated=truncated)
    targets = [
        ppo_eqx.make_batch(model, steps, args).target.reshape(40, 5)
        for args in (ppo_eqx.Args(), ppo_eqx.Args(bootstrap_truncated=False))
    ]
    check(8, dict(targets=targets[0], **ends), dict(targets=targets[1]))
    check(9, dict(done=done, **ends), dict(done=terminated))

    keys = jax.random.split(jax.random.key(0), 4)
    permutations = jax.vmap(lambda key: jax.random.permutation(key, 128))(keys)
    same = jax.vmap(lambda key: jax.random.permutation(keys[0], 128))(keys)
    check(10, dict(permutations=permutations), dict(permutations=same))

    # The last iteration is 16 gradient steps, of 8 * 16 in all.
    @jax.jit
    def around_last_iteration(train_state):
        step = lambda train_state, _: (train_state.apply_gradients(grads=grads), None)
        train_state, _ = jax.lax.scan(step, train_state, length=7 * 16)
        return train_state, jax.lax.scan(step, train_state, length=16)[0]

    schedule = optax.linear_schedule(args.learning_rate, 0.0, args.num_iterations)
    tx = optax.adam(schedule)
    fault = dataclasses.replace(before, tx=tx, opt_state=tx.init(before.model))
    good, bad = (
        dict(zip(("before", "after"), around_last_iteration(train_state)))
        for train_state in (before, fault)
    )
    check(11, good, bad)

    env, _ = ppo_eqx.gymnax.make("CartPole-v1")
    key = jax.random.key(0)
    step = dict(env=env, key=key, env_state=env.reset(key)[1], action=0)

    class OldEnv:
        def step(self, *args):
            return env.step(*args)[:5]

    check(12, step, dict(env=OldEnv()))
    assert found == dict.fromkeys(range(1, 13), (True, False))


@slow
def test_lines_of_the_readme_that_watch_the_policy(monkeypatch, tmp_path, capsys):
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setenv("SDL_AUDIODRIVER", "dummy")
    monkeypatch.chdir(tmp_path)
    ppo_eqx.save(Path("policy.eqx"), start(ppo_eqx, small(ppo_eqx)).train_state)
    exec(readme_block("import equinox as eqx, gymnasium"), {})
    assert (tmp_path / "cartpole.gif").read_bytes().startswith(b"GIF89a")
    assert "Gymnasium, greedy: " in capsys.readouterr().out


def test_metadata_of_the_scripts_is_requirements_txt():
    lines = (FOLDER / "requirements.txt").read_text().splitlines()
    lines = [line.partition("#")[0].strip() for line in lines]
    needed = [x for x in lines if x and not re.match("pytest|ruff|hypo|scipy", x)]
    for name, others in (
        ("ppo_eqx.py", "flax numpy matplotlib"),
        ("ppo_flax.py", "equinox numpy matplotlib"),
        ("compare.py", "-"),
    ):
        source = (FOLDER / name).read_text()
        # The regular expression of PEP 723.
        block = re.search(
            r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source
        )
        content = "".join(line[2:] for line in block["content"].splitlines(True))
        own = [x for x in needed if not x.startswith(tuple(others.split()))]
        assert sorted(tomllib.loads(content)["dependencies"]) == sorted(own)
