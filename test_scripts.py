"""Tests, in the order of the scripts; nearly all run on both. `python -m pytest`."""

import ast
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

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro

import compare
import ppo_eqx
import ppo_flax

FOLDER = Path(__file__).parent
README = (FOLDER / "README.md").read_text()
SCRIPTS = {"eqx": ppo_eqx, "flax": ppo_flax}
both = pytest.mark.parametrize("ppo", SCRIPTS.values(), ids=SCRIPTS.keys())


@functools.cache
def start(ppo, args):
    """The runner state before the first iteration."""
    return jax.jit(ppo.init, static_argnames="args")(jax.random.key(args.seed), args)


@functools.cache
def trained(ppo, args, num_iterations):
    """Runner state and metrics after some iterations, as one call."""
    train = jax.jit(ppo.train, static_argnames=("args", "num_iterations"))
    return train(start(ppo, args), args, num_iterations)


def assert_same_bits(a, b):
    """The same tree of arrays, without any tolerance."""
    a, b = jax.device_get((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


def small(ppo, **kwargs):
    """Arguments of a short run, 8 iterations of 4 x 32 steps, with large updates."""
    defaults = dict(num_steps=32, total_timesteps=1024, num_reports=2)
    return ppo.Args(**defaults | dict(learning_rate=1e-2) | kwargs)


def run_script(ppo, *flags, env=None):
    """Run a script as a user does; warnings are errors."""
    command = [sys.executable, "-W", "error", ppo.__file__, *flags]
    env = os.environ | (env or {})
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=FOLDER)


SHORT_RUN = ("--total-timesteps", "2048", "--num-reports", "2", "--eval-episodes", "3")


# Arguments


@both
def test_help_shows_the_comment_of_every_flag(ppo, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as exit_info:
        tyro.cli(ppo.Args, args=["--help"])
    assert exit_info.value.code == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    source = Path(ppo.__file__).read_text()
    for field in dataclasses.fields(ppo.Args):
        comment = re.search(rf"^    {field.name}: .*  # (.+)$", source, re.MULTILINE)
        assert comment, f"no comment behind {field.name}"
        assert comment[1] in shown
        assert "--" + field.name.replace("_", "-") in shown


POSITIVE_INTS = "total_timesteps num_envs num_steps num_minibatches update_epochs"
BAD_FLAGS = [
    *((f"--{name.replace('_', '-')} {value}", "at least 1") for value in (0, -1)
      for name in f"{POSITIVE_INTS} num_reports eval_episodes".split()),
    *((f"--{name} {value}", "above 0") for value in (0, -1, "nan", "inf")
      for name in ("learning-rate", "clip-coef", "max-grad-norm")),
    *((f"--{name} {value}", "at least 0") for value in (-1, "nan", "inf")
      for name in ("ent-coef", "vf-coef")),
    *((f"--{name} {value}", "from 0 to 1") for value in (-0.1, 1.1, "nan", "inf")
      for name in ("gamma", "gae-lambda")),
    ("--seed -1", "from 0"),
    ("--seed 4294967296", "from 0"),
    ("--num-minibatches 3", "do not divide the batch of 512"),
    ("--num-minibatches 512", "--no-norm-adv"),
    ("--total-timesteps 511", "below the batch of 512"),
    ("--total-timesteps 5e5", "--total-timesteps"),
    ("--env-id CartPole", "CartPole-v1, Pendulum-v1"),
    ("--env-id Pendulum-v1", "actions are not discrete"),
    ("--env-id FrozenLake-misc", "observations are not arrays"),
    ("--activation gelu", "'tanh', 'relu'"),
    ("--learning-rte 1e-3", "--learning-rate"),
    ("--save-path .", "it is a folder"),
    ("--save-path no/such/folder/policy", "No such file"),
    (f"--save-path {__file__}/policy", "Not a directory"),
]  # fmt: skip


@both
@pytest.mark.parametrize("flags, message", BAD_FLAGS, ids=[x for x, _ in BAD_FLAGS])
def test_bad_input_is_refused_in_one_message(ppo, flags, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        tyro.cli(ppo.Args, args=flags.split())
    assert exit_info.value.code == 2
    out, err = capsys.readouterr()
    shown = " ".join(err.replace("│", " ").split())
    assert message in shown and "Traceback" not in shown and not out


@both
def test_bad_input_exits_before_anything_is_printed_or_trained(ppo):
    result = run_script(ppo, "--gamma", "2")
    assert result.returncode == 2 and not result.stdout
    assert "--gamma must be from 0 to 1, not 2.0" in result.stderr
    assert "Traceback" not in result.stderr


@both
def test_steps_are_cut_to_equal_reports(ppo):
    args = ppo.Args()
    assert (args.num_iterations, args.iterations_per_report) == (976, 61)
    args = ppo.Args(num_reports=10)
    assert (args.num_iterations, args.iterations_per_report) == (970, 97)
    args = ppo.Args(total_timesteps=2048)
    assert (args.num_iterations, args.iterations_per_report) == (4, 1)


# MountainCar, so that episodes of random actions are cut off by the time limit of 200.
# The learning rate is high, so that the clipping clips something.
EFFECT_BASE = dict(
    env_id="MountainCar-v0", num_steps=256, total_timesteps=2048, learning_rate=1e-2
)
EFFECTS = dict(
    seed=2, env_id="Acrobot-v1", total_timesteps=4096, learning_rate=1e-3, num_envs=2,
    num_steps=512, anneal_lr=False, gamma=0.9, gae_lambda=0.9, num_minibatches=2,
    update_epochs=2, norm_adv=False, clip_coef=0.01, clip_vloss=False, ent_coef=0.1,
    vf_coef=1.0, max_grad_norm=0.1, activation="relu", bootstrap_truncated=False,
)  # fmt: skip
SHOWN_EFFECTS = {"num_reports", "eval_episodes", "save_path"}  # in the test of main


@functools.cache
def effect_metrics(ppo, **changes):
    """Metrics of two iterations; compiled in a hurry, as nothing is timed here."""
    args = ppo.Args(**EFFECT_BASE | changes)
    run = jax.jit(lambda key: ppo.train(ppo.init(key, args), args, 2)[1])
    lowered = run.lower(jax.random.key(args.seed))
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    return jax.device_get(compiled(jax.random.key(args.seed)))


# In Equinox alone, as it takes long; all that reads flags is the same in Flax (below),
# but for the network.
@pytest.mark.parametrize(
    "ppo, name", [*((ppo_eqx, name) for name in EFFECTS), (ppo_flax, "activation")]
)
def test_every_flag_changes_the_result(ppo, name):
    base, changed = effect_metrics(ppo), effect_metrics(ppo, **{name: EFFECTS[name]})
    assert any(not np.array_equal(base[key], changed[key]) for key in base)


def test_no_flag_is_left_out():
    names = {field.name for field in dataclasses.fields(ppo_eqx.Args)}
    assert names == EFFECTS.keys() | SHOWN_EFFECTS


# Network and train state


@both
def test_initial_weights_are_orthogonal(ppo):
    params = start(ppo, small(ppo)).train_state.params
    params = compare.flax_layout(params) if ppo is ppo_eqx else params
    for name, out_scale in (("actor", 0.01), ("critic", 1.0)):
        layers = params["params"][name]
        scales = (2**0.5, 2**0.5, out_scale)
        for layer, scale in zip(("layers_0", "layers_2", "layers_4"), scales):
            kernel, bias = layers[layer]["kernel"], layers[layer]["bias"]
            small_side = min(kernel.shape)
            kernel = kernel if kernel.shape[1] == small_side else kernel.T
            expected = scale**2 * np.eye(small_side)
            np.testing.assert_allclose(kernel.T @ kernel, expected, atol=2e-6)
            assert not bias.any()


@both
def test_apply_gradients_is_a_step_of_optax(ppo):
    train_state = start(ppo, small(ppo)).train_state
    params, opt_state = train_state.params, train_state.opt_state
    for step in range(1, 4):
        grads = jax.tree.map(lambda x, step=step: jnp.full_like(x, step), params)
        updates, opt_state = train_state.tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        train_state = train_state.apply_gradients(grads=grads)
    assert_same_bits(train_state.params, params)
    assert_same_bits(train_state.opt_state, opt_state)


# Rollout


@both
def test_recorded_log_probs_are_those_of_the_policy_that_acted(ppo):
    args = small(ppo)
    runner_state, _ = trained(ppo, args, 3)
    _, transitions = jax.jit(ppo.rollout, static_argnames="args")(runner_state, args)
    obs = transitions.obs.reshape(-1, 4)
    logits, _ = compare.network(runner_state.train_state)(obs)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = log_probs[jnp.arange(len(obs)), transitions.action.reshape(-1)]
    np.testing.assert_allclose(log_prob, transitions.log_prob.reshape(-1), atol=1e-6)
    # A policy from before the last update acts otherwise.
    logits, _ = compare.network(start(ppo, args).train_state)(obs)
    assert np.abs(jax.nn.log_softmax(logits) - log_probs).max() > 1e-3


@both
def test_the_policy_that_acted_is_the_one_that_learns(ppo):
    # With one gradient step per iteration the ratio is always that of the same policy.
    args = small(ppo, update_epochs=1, num_minibatches=1)
    _, metrics = trained(ppo, args, 8)
    assert np.abs(metrics["approx_kl"]).max() < 1e-6
    assert not metrics["clip_fraction"].any()


@both
def test_final_observation_is_the_one_before_the_reset(ppo):
    args = small(ppo, num_steps=128)
    rollout = jax.jit(ppo.rollout, static_argnames="args")
    _, transitions = rollout(start(ppo, args), args)
    done = np.asarray(transitions.done)[:-1]
    next_obs = np.asarray(transitions.obs)[1:]
    final_obs = np.asarray(transitions.final_observation)[:-1]
    assert done.any() and not done.all()
    np.testing.assert_array_equal(final_obs[~done], next_obs[~done])
    # CartPole starts within 0.05 of 0 and fails beyond 0.2095 rad or 2.4 m.
    assert np.abs(next_obs[done]).max() <= 0.05
    failed = (np.abs(final_obs[..., 2]) > 0.2095) | (np.abs(final_obs[..., 0]) > 2.4)
    np.testing.assert_array_equal(failed, done)


# Advantages


def make_transitions(ppo, reward, terminated, truncated):
    """Transitions with only what compute_gae reads."""
    nothing = dict.fromkeys(ppo.Transition._fields)
    arrays = dict(reward=reward, terminated=terminated, truncated=truncated)
    return ppo.Transition(**nothing | jax.tree.map(jnp.asarray, arrays))


@both
@pytest.mark.parametrize("bootstrap", [True, False])
def test_gae_by_hand(ppo, bootstrap):
    # gamma = 0.5, lambda = 0.5, so gamma * lambda = 0.25. All rewards are 1 and all
    # values 2; the final observations are worth 4. Two environments, three steps:
    # the first terminates at step 1, the second is truncated there.
    args = ppo.Args(gamma=0.5, gae_lambda=0.5, bootstrap_truncated=bootstrap)
    no, yes = False, True
    transitions = make_transitions(
        ppo,
        reward=np.ones((3, 2), np.float32),
        terminated=np.array([[no, no], [yes, no], [no, no]]),
        truncated=np.array([[no, no], [no, yes], [no, no]]),
    )
    values, final_values = jnp.full((4, 2), 2.0), jnp.full((3, 2), 4.0)
    advantages, targets = ppo.compute_gae(transitions, values, final_values, args)
    # delta is 1 + 0.5 * 2 - 2 = 0 within an episode, 1 - 2 = -1 at a termination and
    # 1 + 0.5 * 4 - 2 = 1 at a truncation, if its final observation is bootstrapped.
    at_limit = 1.0 if bootstrap else -1.0
    expected = [[0.25 * -1.0, 0.25 * at_limit], [-1.0, at_limit], [0.0, 0.0]]
    np.testing.assert_array_equal(advantages, np.array(expected, np.float32))
    np.testing.assert_array_equal(targets, np.array(expected, np.float32) + 2)


def numpy_gae(reward, terminated, truncated, values, final_values, args):
    """The recursion in plain loops, written without a look at the scripts."""
    num_steps, num_envs = reward.shape
    advantages = np.zeros_like(reward)
    for env in range(num_envs):
        advantage = 0.0
        for step in reversed(range(num_steps)):
            if terminated[step, env]:
                next_value, advantage = 0.0, 0.0
            elif truncated[step, env]:
                next_value = (
                    final_values[step, env] if args.bootstrap_truncated else 0.0
                )
                advantage = 0.0
            else:
                next_value = values[step + 1, env]
            delta = reward[step, env] + args.gamma * next_value - values[step, env]
            advantage = delta + args.gamma * args.gae_lambda * advantage
            advantages[step, env] = advantage
    return advantages


def random_steps(rng, num_steps=40, num_envs=5):
    """Rewards, ends and values; some steps terminate and are truncated at once."""
    shape = (num_steps, num_envs)
    terminated, truncated = rng.random(shape) < 0.2, rng.random(shape) < 0.2
    terminated[3], truncated[3] = True, True
    terminated[-1], truncated[-1] = False, True
    reward, final_values = rng.normal(size=(2, *shape)).astype(np.float32)
    values = rng.normal(size=(num_steps + 1, num_envs)).astype(np.float32)
    return reward, terminated, truncated, values, final_values


@both
@pytest.mark.parametrize("bootstrap", [True, False])
def test_gae_against_a_plain_loop(ppo, bootstrap):
    args = ppo.Args(bootstrap_truncated=bootstrap)
    for seed in range(5):
        steps = random_steps(np.random.default_rng(seed))
        reward, terminated, truncated, values, final_values = steps
        transitions = make_transitions(ppo, reward, terminated, truncated)
        advantages, targets = ppo.compute_gae(transitions, values, final_values, args)
        expected = numpy_gae(*steps, args)
        np.testing.assert_allclose(advantages, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(
            targets, expected + values[:-1], rtol=1e-5, atol=1e-5
        )


@both
@pytest.mark.parametrize("bootstrap", [True, False])
def test_gae_reads_final_values_at_truncated_steps_only(ppo, bootstrap):
    args = ppo.Args(bootstrap_truncated=bootstrap)
    reward, terminated, truncated, values, final_values = random_steps(
        np.random.default_rng(0)
    )
    final_values[~truncated | terminated] = np.nan
    # The value after a done step is of another episode.
    values[1:][terminated | truncated] = 1e6
    transitions = make_transitions(ppo, reward, terminated, truncated)
    advantages, _ = ppo.compute_gae(transitions, values, final_values, args)
    assert np.isfinite(advantages).all()


@both
def test_final_observations_count_at_truncated_steps_and_nowhere_else(ppo, monkeypatch):
    args = small(ppo, env_id="MountainCar-v0", num_steps=256, total_timesteps=2048)
    rollout = ppo.rollout

    @jax.jit
    def losses(runner_state, at_truncated, elsewhere):
        def planting_rollout(runner_state, args):
            runner_state, transitions = rollout(runner_state, args)
            factor = jnp.where(transitions.truncated, at_truncated, elsewhere)
            planted = transitions.final_observation * factor[..., None]
            return runner_state, transitions._replace(final_observation=planted)

        monkeypatch.setattr(ppo, "rollout", planting_rollout)
        _, metrics = ppo.train(runner_state, args, 2)
        return metrics["loss"], metrics["episodes"]

    loss, episodes = losses(start(ppo, args), 1.0, 1.0)
    assert episodes.sum() > 0 and np.isfinite(loss).all()
    assert_same_bits(losses(start(ppo, args), 1.0, np.nan)[0], loss)
    # But at a time limit they count.
    assert (losses(start(ppo, args), 2.0, 1.0)[0] != loss).any()


# Loss


def random_batch(ppo, size=64):
    """A batch of CartPole's shapes."""
    rng = np.random.default_rng(0)
    obs, action = rng.normal(size=(size, 4)), rng.integers(0, 2, size)
    log_prob, value, advantage, target = rng.normal(size=(4, size))
    batch = ppo.Batch(obs, action, 0.1 * log_prob - 0.7, value, advantage, target)
    return jax.tree.map(jnp.asarray, batch)


@both
@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("clip_vloss", [True, False])
def test_loss_against_numpy(ppo, norm_adv, clip_vloss):
    args = ppo.Args(norm_adv=norm_adv, clip_vloss=clip_vloss, clip_coef=0.1)
    train_state = start(ppo, small(ppo)).train_state
    batch = random_batch(ppo)
    loss, metrics, _ = compare.loss_and_grads(train_state, batch, args)

    logits, value = jax.device_get(compare.network(train_state)(batch.obs))
    old = jax.device_get(batch)
    probs = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    ratio = np.array([p[a] for p, a in zip(probs, old.action)]) / np.exp(old.log_prob)
    adv = old.advantage
    if norm_adv:
        adv = (adv - np.mean(adv)) / (np.std(adv) + 1e-8)
    policy = [min(r * a, min(max(r, 0.9), 1.1) * a) for r, a in zip(ratio, adv)]
    errors = (value - old.target) ** 2
    if clip_vloss:
        near = old.value + np.minimum(np.maximum(value - old.value, -0.1), 0.1)
        errors = np.maximum(errors, (near - old.target) ** 2)
    entropy = -np.mean(np.sum(probs * np.log(probs), axis=1))
    expected = {
        "policy_loss": -np.mean(policy),
        "value_loss": np.mean(errors) / 2,
        "entropy": entropy,
        "approx_kl": np.mean(ratio - 1 - np.log(ratio)),
        "clip_fraction": np.mean(np.abs(ratio - 1) > 0.1),
        "loss": -np.mean(policy) + 0.5 * np.mean(errors) / 2 - 0.01 * entropy,
    }
    assert metrics.keys() == expected.keys()
    assert 0.1 < expected["clip_fraction"] < 0.9  # both sides of the clipping are met
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(loss, metrics["loss"])


def record_minibatches(ppo, monkeypatch):
    """Lists of the minibatches and ratios that `update` will show to `ppo_loss`."""
    seen, original = [], ppo.ppo_loss

    def recording_loss(*model_batch_args):
        *model, batch, args = model_batch_args
        loss, metrics = original(*model, batch, args)
        seen_now = (batch, metrics["approx_kl"], metrics["clip_fraction"])
        jax.debug.callback(lambda *x: seen.append(x), *seen_now, ordered=True)
        return loss, metrics

    monkeypatch.setattr(ppo, "ppo_loss", recording_loss)
    return seen


@both
def test_every_sample_is_used_once_per_epoch_in_a_new_order(ppo, monkeypatch):
    args = small(ppo, update_epochs=3)
    train_state = start(ppo, args).train_state
    batch = random_batch(ppo, args.batch_size)
    batch = batch._replace(target=jnp.arange(args.batch_size, dtype=jnp.float32))
    seen = record_minibatches(ppo, monkeypatch)
    update = jax.jit(lambda train_state, key: ppo.update(train_state, batch, key, args))
    jax.block_until_ready(update(train_state, jax.random.key(0)))
    jax.effects_barrier()
    assert len(seen) == args.update_epochs * args.num_minibatches
    samples = np.stack([minibatch.target for minibatch, _, _ in seen]).astype(int)
    epochs = samples.reshape(args.update_epochs, args.batch_size)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), np.arange(args.batch_size))
    assert len({tuple(epoch) for epoch in epochs}) == args.update_epochs
    # All of a sample moves together.
    for minibatch, _, _ in seen:
        indices = minibatch.target.astype(int)
        np.testing.assert_array_equal(minibatch.obs, batch.obs[indices])
        np.testing.assert_array_equal(minibatch.log_prob, batch.log_prob[indices])


@both
def test_ratio_is_one_in_the_first_minibatch_only(ppo, monkeypatch):
    args = small(ppo)
    train_state = start(ppo, args).train_state
    batch = random_batch(ppo, args.batch_size)
    seen = record_minibatches(ppo, monkeypatch)
    logits, value = compare.network(train_state)(batch.obs)
    log_prob = jax.nn.log_softmax(logits)[jnp.arange(args.batch_size), batch.action]
    batch = batch._replace(log_prob=log_prob, value=value)
    jax.jit(lambda x: ppo.update(x, batch, jax.random.key(0), args))(train_state)
    jax.effects_barrier()
    kls = [float(kl) for _, kl, _ in seen]
    assert abs(kls[0]) < 1e-7 and min(kls[1:]) > 1e-6


@both
def test_ratio_is_exactly_one_at_the_old_policy(ppo):
    args = small(ppo)
    train_state = start(ppo, args).train_state
    batch = random_batch(ppo)
    logits, _ = compare.network(train_state)(batch.obs)
    log_prob = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch.action]
    batch = batch._replace(log_prob=log_prob)
    _, metrics, _ = compare.loss_and_grads(train_state, batch, args)
    assert metrics["approx_kl"] == 0 and metrics["clip_fraction"] == 0
    advantage = batch.advantage
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    assert metrics["policy_loss"] == -advantage.mean()


# Training


@both
def test_adam_counts_gradient_steps_and_the_rate_ends_at_zero(ppo):
    args = small(ppo)
    runner_state, _ = trained(ppo, args, args.num_iterations)
    train_state = runner_state.train_state
    steps = args.num_iterations * args.update_epochs * args.num_minibatches
    counts = optax.tree_utils.tree_get_all_with_path(train_state.opt_state, "count")
    assert [int(count) for _, count in counts] == [steps, steps]  # Adam, schedule
    grads = jax.tree.map(jnp.ones_like, train_state.params)
    after = train_state.apply_gradients(grads=grads)
    assert_same_bits(after.params, train_state.params)
    # Before the end there is still a rate.
    runner_state, _ = trained(ppo, args, 3)
    before = runner_state.train_state
    after = before.apply_gradients(grads=grads)
    assert any(
        (x != y).any()
        for x, y in zip(jax.tree.leaves(before.params), jax.tree.leaves(after.params))
    )


@both
def test_same_seed_same_bits_whatever_the_number_of_reports(ppo):
    args = small(ppo)
    train = jax.jit(ppo.train, static_argnames=("args", "num_iterations"))
    first, second = (train(start(ppo, args), args, 8) for _ in range(2))
    assert_same_bits(first[1], second[1])
    assert_same_bits(first[0].train_state.params, second[0].train_state.params)

    args = small(ppo, num_reports=4)
    state, parts = start(ppo, args), []
    for _ in range(4):
        state, part = train(state, args, args.iterations_per_report)
        parts.append(part)
    assert_same_bits(jax.tree.map(lambda *x: jnp.concatenate(x), *parts), first[1])
    assert_same_bits(state.train_state.params, first[0].train_state.params)

    init = jax.jit(ppo.init, static_argnames="args")
    other, _ = train(init(jax.random.key(2), args), args, args.iterations_per_report)
    assert (np.asarray(other.obs) != np.asarray(state.obs)).any()


@both
def test_compiles_once_also_when_the_state_is_passed_back(ppo):
    # In MountainCar the types of reset and step differ.
    args = small(ppo, env_id="MountainCar-v0")
    traces = []

    @jax.jit
    def train(runner_state):
        traces.append(1)
        return ppo.train(runner_state, args, 2)

    state = start(ppo, args)
    for _ in range(3):
        state, _ = train(state)
    assert len(traces) == 1


@both
def test_metrics_are_a_few_numbers_per_iteration(ppo):
    _, metrics = trained(ppo, small(ppo), 8)
    assert {metric.shape for metric in metrics.values()} == {(8,)}
    episodes = np.asarray(metrics["episodes"])
    assert episodes[0] > 0 and metrics["episode_return"][0] >= metrics["min_return"][0]
    # No episode of Acrobot ends in 4 x 32 steps: its return is not known, and not 0.
    _, metrics = trained(ppo, small(ppo, env_id="Acrobot-v1"), 1)
    assert metrics["episodes"] == 0
    assert np.isnan(metrics["episode_return"]) and np.isnan(metrics["min_return"])


ENVIRONMENTS = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Breakout-MinAtar"]


@both
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_environments(ppo, env_id):
    args = small(ppo, env_id=env_id)
    runner_state, metrics = trained(ppo, args, 1)
    assert np.isfinite(metrics["loss"]).all()
    env, env_params = ppo_eqx.gymnax.make(env_id)
    obs_size = np.prod(env.observation_space(env_params).shape)
    assert runner_state.obs.shape == (4, obs_size)


# Evaluation


@both
@pytest.mark.parametrize("greedy", [True, False])
def test_evaluation_measures_each_episode_to_its_own_end_once(ppo, greedy):
    args = small(ppo, eval_episodes=3)
    train_state = start(ppo, args).train_state
    key = jax.random.key(7)
    evaluate = jax.jit(ppo.evaluate, static_argnames="args")
    returns = evaluate(train_state, key, args, greedy)

    env, _ = ppo_eqx.gymnax.make("CartPole-v1")
    reset_key, key = jax.random.split(key)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(reset_key, 3))
    expected, running = np.zeros(3), np.ones(3, bool)
    while running.any():
        action_key, step_key, key = jax.random.split(key, 3)
        logits, _ = compare.network(train_state)(obs)
        action = jax.random.categorical(action_key, logits)
        action = logits.argmax(axis=1) if greedy else action
        step_keys = jax.random.split(step_key, 3)
        obs, env_state, reward, terminated, truncated, _ = jax.vmap(env.step)(
            step_keys, env_state, action
        )
        expected += np.where(running, reward, 0)
        running &= ~np.asarray(terminated | truncated)
    assert len(set(expected)) > 1
    np.testing.assert_array_equal(returns, expected)


# Command line


@both
def test_default_run_learns_prints_and_saves(ppo, capsys, monkeypatch, tmp_path):
    traces, train = [], ppo.train

    @functools.wraps(train)
    def counting_train(*args):
        traces.append(1)
        return train(*args)

    monkeypatch.setattr(ppo, "train", counting_train)
    path = tmp_path / "policy.eqx"
    ppo.main(ppo.Args(seed=1, save_path=path))
    assert len(traces) == 1
    lines = capsys.readouterr().out.splitlines()
    header = lines.index(next(line for line in lines if "policy_loss" in line))
    reports = [line.split() for line in lines[header + 1 :]][:16]
    assert [int(line[0]) for line in reports] == [31232 * i for i in range(1, 17)]
    assert any(re.match(r"init .* s, compile .* s", line) for line in lines)
    assert any(re.match(r"run .* s, \d+ environment steps/s", line) for line in lines)
    for name in ("greedy", "sampled"):
        assert f"100 {name} episodes: return 500.0 +- 0.0, min 500.0" in lines
    assert [file.name for file in tmp_path.iterdir()] == ["policy.eqx"]

    # The saved policy keeps the pole up until the time limit and never fails.
    args = ppo.Args(num_steps=1024)
    runner_state = start(ppo, args)
    train_state = load(ppo, path, runner_state.train_state)
    runner_state = runner_state._replace(train_state=train_state)
    _, transitions = jax.jit(ppo.rollout, static_argnames="args")(runner_state, args)
    assert transitions.truncated.any() and not transitions.terminated.any()
    assert set(np.asarray(transitions.episode_return[transitions.done])) == {500.0}


def readme_block(start):
    """The code block of the README that starts so."""
    (block,) = re.findall(rf"^```python\n({start}.*?)^```", README, re.M | re.S)
    return block


LOADS = {
    ppo_eqx: ("policy.eqx", "import equinox as eqx, jax", ("4, 2,", "4, 3,")),
    ppo_flax: ("policy.msgpack", "import flax", ("actions=2", "actions=3")),
}


@both
def test_lines_of_the_readme_load_and_act_and_refuse_other_sizes(
    ppo, monkeypatch, tmp_path
):
    name, first_words, wrong_actions = LOADS[ppo]
    monkeypatch.chdir(tmp_path)
    train_state = trained(ppo, small(ppo), 3)[0].train_state
    ppo.save(Path(name), train_state)
    names, lines = {}, readme_block(first_words)
    exec(lines, names)
    logits, _ = compare.network(train_state)(np.zeros((1, 4)))
    assert names["action"] == logits[0].argmax()
    wrong_obs = ("4, 2,", "6, 2,") if ppo is ppo_eqx else ("zeros(4)", "zeros(6)")
    for before, after in (wrong_actions, wrong_obs):
        assert before in lines
        with pytest.raises((RuntimeError, flax.errors.ScopeParamShapeError)):
            exec(lines.replace(before, after), {})


def load(ppo, path, train_state):
    """The train state with saved parameters."""
    if ppo is ppo_eqx:
        params = ppo.eqx.tree_deserialise_leaves(path, train_state.params)
        return dataclasses.replace(train_state, params=params)
    params = flax.serialization.from_bytes(train_state.params, path.read_bytes())
    return train_state.replace(params=params)


# In Equinox alone, as it takes long; main and report are the same in Flax (below).
def test_short_run_prints_a_dash_without_episodes(capsys, ppo=ppo_eqx):
    flags = "--env-id Acrobot-v1 --num-steps 32 --total-timesteps 700 --num-reports 2"
    ppo.main(tyro.cli(ppo.Args, args=f"{flags} --eval-episodes 3".split()))
    lines = capsys.readouterr().out.splitlines()
    reports = [line.split() for line in lines if re.match(r" *(256|512) ", line)]
    assert [line[1:3] for line in reports] == [["-", "-"]] * 2
    assert "(1 more would fit, but not in 2 equal reports)" in lines
    assert any(line.startswith("3 greedy episodes: return -") for line in lines)


@both
def test_runs_in_x64_with_key_reuse_and_warnings_as_errors(ppo):
    env = {"JAX_DEBUG_KEY_REUSE": "1", "JAX_ENABLE_X64": "1"}
    result = run_script(ppo, *SHORT_RUN, env=env)
    assert result.returncode == 0, result.stderr
    assert not result.stderr
    assert "3 sampled episodes: return" in result.stdout


@both
def test_every_parameter_is_float64_under_x64(ppo):
    with jax.enable_x64(True):
        args = small(ppo)
        init = jax.jit(ppo.init, static_argnames="args")
        train_state = init(jax.random.key(1), args).train_state
        assert {x.dtype for x in jax.tree.leaves(train_state.params)} == {
            jnp.dtype("float64")
        }


# The two trainings agree


def shared_start():
    """Arguments and runner states of both scripts with Equinox's initial weights."""
    args = small(ppo_eqx)
    eqx_state, flax_state = start(ppo_eqx, args), start(ppo_flax, small(ppo_flax))
    params = compare.flax_layout(eqx_state.train_state.params)
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
    args, eqx_state, flax_state = shared_start()
    batch = random_batch(ppo_eqx)
    results = [
        (*compare.network(state.train_state)(batch.obs),
         *compare.loss_and_grads(state.train_state, batch, args))
        for ppo, state in ((ppo_eqx, eqx_state), (ppo_flax, flax_state))
    ]  # fmt: skip
    (logits, value, loss, _, grads), (logits2, value2, loss2, _, grads2) = results
    np.testing.assert_allclose(logits, logits2, atol=1e-6)
    np.testing.assert_allclose(value, value2, atol=1e-6)
    np.testing.assert_allclose(loss, loss2, rtol=1e-5)
    grads = compare.flax_layout(grads)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2)):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())


def test_same_weights_give_the_same_first_iteration():
    args, eqx_state, flax_state = shared_start()
    transitions, params = [], []
    for ppo, state in ((ppo_eqx, eqx_state), (ppo_flax, flax_state)):
        rollout = jax.jit(ppo.rollout, static_argnames="args")
        train = jax.jit(ppo.train, static_argnames=("args", "num_iterations"))
        transitions.append(rollout(state, args)[1])
        params.append(train(state, args, 1)[0].train_state.params)
    assert_same_bits(transitions[0].action, transitions[1].action)
    assert_same_bits(transitions[0].obs, transitions[1].obs)
    params[0] = compare.flax_layout(params[0])
    for x, y in zip(jax.tree.leaves(params[0]), jax.tree.leaves(params[1])):
        np.testing.assert_allclose(x, y, atol=1e-5)


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


def alone(variant, x64=False, change=lambda runner_state: runner_state):
    """Metrics (1, I) and parameters of the first seed, not mapped over anything."""
    ppo = ppo_flax if variant == "flax" else ppo_eqx
    with jax.enable_x64(x64):
        runner_state = change(compare.init(jax.random.key(1), variant, short()))
        train = jax.jit(ppo.train, static_argnames=("args", "num_iterations"))
        runner_state, metrics = jax.device_get(train(runner_state, short(), 20))
        params = jax.device_get(compare.flax_layout(runner_state.train_state.params))
    return {name: x[None] for name, x in metrics.items()}, params


@pytest.mark.parametrize("x64", [False, True])
def test_flax_order_is_flax_bit_for_bit(x64):
    metrics, params = alone("flax", x64)
    assert metrics["loss"].dtype == (np.float64 if x64 else np.float32)
    same_metrics, same_params = alone("equinox-flax-order", x64)
    assert_same_bits(metrics, same_metrics)
    assert_same_bits(params, same_params)
    if not x64:
        other_metrics, _ = alone("equinox")
        assert compare.first_difference(metrics, other_metrics, ["loss"]) != "none"


def test_one_unit_in_the_last_place_of_one_weight_is_noticed():
    def change(runner_state):
        params = runner_state.train_state.params
        kernel = params.actor.layers[0].kernel
        kernel = kernel.at[0, 0].set(jnp.nextafter(kernel[0, 0], 1.0))
        params = ppo_eqx.eqx.tree_at(lambda x: x.actor.layers[0].kernel, params, kernel)
        train_state = dataclasses.replace(runner_state.train_state, params=params)
        return runner_state._replace(train_state=train_state)

    metrics, _ = alone("flax")
    other_metrics, _ = alone("equinox-flax-order", change=change)
    assert compare.first_difference(metrics, other_metrics, compare.METRICS) != "none"


def test_flax_order_is_flax_bit_for_bit_over_all_seeds():
    assert_same_bits(result("flax")["metrics"], result("equinox-flax-order")["metrics"])
    assert_same_bits(result("flax")["params"], result("equinox-flax-order")["params"])
    assert "is flax bit for bit" in compare.verdict(short(), results())
    # And it is said if it is not so.
    other = result("flax") | dict(params=result("equinox")["params"])
    assert "NOT" in compare.verdict(short(), results() | {"flax": other})
    other = result("flax") | dict(metrics=result("equinox")["metrics"])
    assert "NOT" in compare.verdict(short(), results() | {"flax": other})


def test_a_lane_is_the_script_alone_bit_for_bit():
    assert result("equinox")["metrics"]["loss"].shape == (3, 20)
    args = small(ppo_eqx, total_timesteps=2560, eval_episodes=3)
    init = jax.jit(ppo_eqx.init, static_argnames="args")
    train = jax.jit(ppo_eqx.train, static_argnames=("args", "num_iterations"))
    for lane, seed in enumerate((1, 2, 3)):
        runner_state, metrics = train(init(jax.random.key(seed), args), args, 20)
        params = compare.flax_layout(runner_state.train_state.params)
        at_lane = lambda tree, lane=lane: jax.tree.map(lambda x: x[lane], tree)
        assert_same_bits(metrics, at_lane(result("equinox")["metrics"]))
        assert_same_bits(params, at_lane(result("equinox")["params"]))
    evaluate = jax.jit(ppo_eqx.evaluate, static_argnames="args")
    for name, key in zip(("greedy", "sampled"), jax.random.split(runner_state.key)):
        returns = evaluate(runner_state.train_state, key, args, name == "greedy")
        assert_same_bits(returns, result("equinox")[name][lane])


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_lanes_are_mapped_on_a_cpu_and_vmapped_elsewhere(backend, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    lanes = jnp.arange(4.0 * jax.device_count()).reshape(-1, 4)
    shapes = []

    def double(x):
        shapes.append(x.shape)
        return 2 * x

    compiled = compare.compile_for_all(double, lanes)
    np.testing.assert_array_equal(compiled(lanes), 2 * lanes)
    assert ("while" in compiled.as_text()) == (backend == "cpu") and shapes[0] == (4,)


def test_only_the_bug_loses_the_state_of_adam():
    for variant in compare.COLORS:
        opt_state = result(variant)["opt_state"]
        counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
        expected = 0 if variant == "equinox-no-opt-state" else 20 * 4 * 4
        assert len(counts) == 2
        for _, count in counts:
            np.testing.assert_array_equal(count, np.full(3, expected))


def test_seeds_start_from_the_same_weights():
    args = short()
    for seed in (1, 2):
        states = [compare.init(jax.random.key(seed), x, args) for x in compare.COLORS]
        weights = [compare.flax_layout(state.train_state.params) for state in states]
        for state, other in zip(states, weights):
            assert_same_bits(other, weights[0])
            assert_same_bits(state.obs, states[0].obs)


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


def test_interrupt_leaves_what_has_ended(monkeypatch, tmp_path, capsys):
    code = run_main(monkeypatch, tmp_path, stop_at="equinox")
    assert code == 130
    metrics, _ = compare.from_csv((tmp_path / "returns.csv").read_text())
    assert list(metrics) == ["flax"]
    assert "| flax |" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert "interrupted" in capsys.readouterr().err


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


def test_checks_of_the_readme_flag_the_fault_and_pass_on_the_scripts():
    args = small(ppo_eqx)
    first = start(ppo_eqx, args)
    state, _ = trained(ppo_eqx, args, 3)
    before, after = first.train_state, state.train_state
    model, old_model = after.model, before.model
    found = {}

    def check(number, good, bad):
        found[number] = check_passes(number, good), check_passes(number, good | bad)

    bug = compare.NoOptState(**vars(before))
    grads = jax.tree.map(jnp.ones_like, before.params)
    check(
        1,
        dict(before=before, after=after),
        dict(after=bug.apply_gradients(grads=grads)),
    )

    _, steps = jax.jit(ppo_eqx.rollout, static_argnames="args")(state, args)
    obs, action, log_prob = (
        x.reshape(-1, *x.shape[2:]) for x in (steps.obs, steps.action, steps.log_prob)
    )
    recorded = dict(obs=obs, action=action, log_prob=log_prob)
    check(2, dict(model=model, **recorded), dict(model=old_model))

    check(3, dict(params=after.params), dict(params=model))
    updates, _ = after.tx.update(grads, after.opt_state, after.params)
    check(4, dict(params=after.params, updates=updates), dict(params=model))

    default = ppo_eqx.eqx.nn.MLP(4, 2, 64, 2, key=jax.random.key(0))
    default = ppo_eqx.eqx.tree_at(lambda model: model.actor, old_model, default)
    weights = (model.actor.layers[1].weight for model in (old_model, default))
    check(5, *(dict(weight=weight) for weight in weights))

    params = compare.flax_layout(after.params)
    layers = dict(params["params"]["actor"])
    layers["layers_2"] = layers["layers_2"] | {"kernel": layers["layers_2"]["kernel"].T}
    copied = {"params": params["params"] | {"actor": layers}}
    flax_network = ppo_flax.ActorCritic(num_actions=2, activation="tanh")
    good = dict(model=model, network=flax_network, params=params, obs=obs)
    check(6, good, dict(params=copied))

    _, value = compare.network(after)(obs)
    check(7, dict(value=value, target=jnp.zeros(len(obs))), dict(value=value[:, None]))

    rng = np.random.default_rng(0)
    reward, terminated, truncated, values, final_values = random_steps(rng)
    ends = dict(reward=reward, terminated=terminated, truncated=truncated)
    transitions = make_transitions(ppo_eqx, **ends)
    targets = [
        ppo_eqx.compute_gae(transitions, values, final_values, args)[1]
        for args in (ppo_eqx.Args(), ppo_eqx.Args(bootstrap_truncated=False))
    ]
    check(8, dict(targets=targets[0], **ends), dict(targets=targets[1]))
    check(9, dict(done=transitions.done, **ends), dict(done=transitions.terminated))

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
    fault = dataclasses.replace(before, tx=tx, opt_state=tx.init(before.params))
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
    needed = [x for x in lines if x and not re.match("pytest|ruff", x)]
    for name in ("ppo_eqx.py", "ppo_flax.py", "compare.py"):
        source = (FOLDER / name).read_text()
        # The regular expression of PEP 723.
        block = re.search(
            r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source
        )
        content = "".join(line[2:] for line in block["content"].splitlines(True))
        assert tomllib.loads(content)["dependencies"] == needed


# Siblings


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
    "make_env Args make_optimizer Transition RunnerState reset compute_gae Batch init "
    "LOSSES report main"
).split()


def test_shared_definitions_have_the_same_source():
    eqx_definitions, flax_definitions = definitions(ppo_eqx), definitions(ppo_flax)
    for name in SHARED:
        assert eqx_definitions[name] == flax_definitions[name], name
    # The same definitions in the same order; Flax imports its TrainState.
    assert [n for n in eqx_definitions if n != "TrainState"] == list(flax_definitions)


def test_the_diff_is_small():
    a, b = (Path(ppo.__file__).read_text().splitlines() for ppo in SCRIPTS.values())
    opcodes = difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    changes = [x for x in opcodes if x[0] != "equal"]
    assert len(changes) <= 16
    removed = sum(i2 - i1 for _, i1, i2, _, _ in changes)
    added = sum(j2 - j1 for _, _, _, j1, j2 in changes)
    assert removed + added <= 100
    # The README says how long and how far apart they are.
    counts = (
        f"Of {len(a)} and {len(b)} lines, {removed} and {added} are not in the other"
    )
    assert counts in README
