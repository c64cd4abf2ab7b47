"""Tests, in the order of the scripts; nearly all run on both. `python -m pytest`."""

import ast
import dataclasses
import difflib
import functools
import os
from pathlib import Path
import re
import subprocess
import sys

import flax
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro

import ppo_eqx
import ppo_flax

FOLDER = Path(__file__).parent
README = (FOLDER / "README.md").read_text()
SCRIPTS = {"eqx": ppo_eqx, "flax": ppo_flax}
both = pytest.mark.parametrize("ppo", SCRIPTS.values(), ids=SCRIPTS.keys())


def network(ppo, train_state):
    """The function obs (B, O) -> logits (B, A), value (B,)."""
    if ppo is ppo_eqx:
        return jax.vmap(train_state.model)
    return functools.partial(train_state.apply_fn, train_state.params)


def loss_and_grads(ppo, train_state, batch, args):
    """Loss, its parts and the gradients of one minibatch."""
    if ppo is ppo_eqx:
        # The arrays of the model are the parameters: what filter_grad differentiates.
        def loss(params):
            model = dataclasses.replace(train_state, params=params).model
            return ppo.ppo_loss(model, batch, args)
    else:

        def loss(params):
            return ppo.ppo_loss(params, train_state.apply_fn, batch, args)

    (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(train_state.params)
    return value, metrics, grads


def to_flax(model):
    """Flax's parameters with the arrays of an Equinox model (or of its gradients)."""
    return {
        "params": {
            name: {
                f"layers_{2 * i}": {"kernel": layer.weight.T, "bias": layer.bias}
                for i, layer in enumerate(getattr(model, name).layers)
            }
            for name in ("actor", "critic")
        }
    }


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
    params = to_flax(params) if ppo is ppo_eqx else params
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
    logits, _ = network(ppo, runner_state.train_state)(obs)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = log_probs[jnp.arange(len(obs)), transitions.action.reshape(-1)]
    np.testing.assert_allclose(log_prob, transitions.log_prob.reshape(-1), atol=1e-6)
    # A policy from before the last update acts otherwise.
    logits, _ = network(ppo, start(ppo, args).train_state)(obs)
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
def test_nan_in_unused_final_observations_leaves_the_training_finite(ppo, monkeypatch):
    args = small(ppo, env_id="MountainCar-v0", num_steps=256, total_timesteps=2048)
    rollout = ppo.rollout

    def rollout_with_nan(runner_state, args):
        runner_state, transitions = rollout(runner_state, args)
        final_obs = transitions.final_observation
        planted = jnp.where(transitions.truncated[..., None], final_obs, jnp.nan)
        return runner_state, transitions._replace(final_observation=planted)

    runner_state, metrics = trained(ppo, args, 2)
    assert metrics["episodes"].sum() > 0
    monkeypatch.setattr(ppo, "rollout", rollout_with_nan)
    jitted = jax.jit(lambda runner_state: ppo.train(runner_state, args, 2))
    planted_state, planted_metrics = jitted(start(ppo, args))
    assert np.isfinite(planted_metrics["loss"]).all()
    np.testing.assert_allclose(planted_metrics["loss"], metrics["loss"], rtol=1e-4)


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
    loss, metrics, _ = loss_and_grads(ppo, train_state, batch, args)

    logits, value = jax.device_get(network(ppo, train_state)(batch.obs))
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
    logits, value = network(ppo, train_state)(batch.obs)
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
    logits, _ = network(ppo, train_state)(batch.obs)
    log_prob = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), batch.action]
    batch = batch._replace(log_prob=log_prob)
    _, metrics, _ = loss_and_grads(ppo, train_state, batch, args)
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

    other, _ = train(start(ppo, small(ppo, seed=2)), args, args.iterations_per_report)
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
    env, env_params = gymnax.make(env_id)
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

    env, _ = gymnax.make("CartPole-v1")
    reset_key, key = jax.random.split(key)
    obs, env_state = jax.vmap(env.reset)(jax.random.split(reset_key, 3))
    expected, running = np.zeros(3), np.ones(3, bool)
    while running.any():
        action_key, step_key, key = jax.random.split(key, 3)
        logits, _ = network(ppo, train_state)(obs)
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
    ppo_eqx: ("policy.eqx", "import equinox", (("4, 2,", "4, 3,"), ("4, 2,", "6, 2,"))),
    ppo_flax: (
        "policy.msgpack", "import flax", (("actions=2", "actions=3"), ("(4)", "(6)"))
    ),
}  # fmt: skip


@both
def test_lines_of_the_readme_load_and_act_and_refuse_other_sizes(
    ppo, monkeypatch, tmp_path
):
    name, first_words, changes = LOADS[ppo]
    monkeypatch.chdir(tmp_path)
    ppo.save(Path(name), trained(ppo, small(ppo), 3)[0].train_state)
    names = {}
    exec(readme_block(first_words), names)
    logits, _ = network(ppo, trained(ppo, small(ppo), 3)[0].train_state)(
        np.zeros((1, 4))
    )
    assert names["action"] == logits[0].argmax()
    for before, after in changes:
        assert before in readme_block(first_words)
        with pytest.raises((RuntimeError, flax.errors.ScopeParamShapeError)):
            exec(readme_block(first_words).replace(before, after), {})


def load(ppo, path, train_state):
    """The train state with saved parameters."""
    if ppo is ppo_eqx:
        params = ppo.eqx.tree_deserialise_leaves(path, train_state.params)
        return dataclasses.replace(train_state, params=params)
    params = flax.serialization.from_bytes(train_state.params, path.read_bytes())
    return train_state.replace(params=params)


@both
def test_short_run_prints_a_dash_without_episodes(ppo, capsys):
    flags = "--env-id Acrobot-v1 --num-steps 32 --total-timesteps 700 --num-reports 2"
    ppo.main(tyro.cli(ppo.Args, args=f"{flags} --eval-episodes 3".split()))
    lines = capsys.readouterr().out.splitlines()
    reports = [line.split() for line in lines if re.match(r" *(256|512) ", line)]
    assert [line[1:3] for line in reports] == [["-", "-"]] * 2
    assert "(1 more would fit, but not in 2 equal reports)" in lines
    assert any(line.startswith("3 greedy episodes: return -") for line in lines)


@both
@pytest.mark.parametrize("env", ["JAX_DEBUG_KEY_REUSE", "JAX_ENABLE_X64"])
def test_runs_with_checks_on_and_warnings_as_errors(ppo, env):
    result = run_script(ppo, *SHORT_RUN, env={env: "1"})
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
    params = to_flax(eqx_state.train_state.params)
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
        (*network(ppo, state.train_state)(batch.obs),
         *loss_and_grads(ppo, state.train_state, batch, args))
        for ppo, state in ((ppo_eqx, eqx_state), (ppo_flax, flax_state))
    ]  # fmt: skip
    (logits, value, loss, _, grads), (logits2, value2, loss2, _, grads2) = results
    np.testing.assert_allclose(logits, logits2, atol=1e-6)
    np.testing.assert_allclose(value, value2, atol=1e-6)
    np.testing.assert_allclose(loss, loss2, rtol=1e-5)
    grads = to_flax(grads)
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
    params[0] = to_flax(params[0])
    for x, y in zip(jax.tree.leaves(params[0]), jax.tree.leaves(params[1])):
        np.testing.assert_allclose(x, y, atol=1e-5)


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
    assert sum(i2 - i1 + j2 - j1 for _, i1, i2, j1, j2 in changes) <= 100
