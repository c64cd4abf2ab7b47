# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "jax>=0.10,<0.12",
#     "equinox>=0.13.2,<0.14",
#     "flax>=0.12.7,<0.13",
#     "optax>=0.2.6,<0.3",
#     "gymnax>=1.0.1,<1.1",
#     "six>=1.16,<2",  # gymnax 1.0.1 imports it and does not declare it
#     "tyro>=1.0.16,<1.1",
#     "numpy>=2.0,<3",
#     "matplotlib>=3.10.8,<4",
# ]
# ///
"""Proximal Policy Optimization (PPO) in JAX: one file, one jitted program.

    python ppo_flax.py --seed 1
    python ppo_flax.py --help

Environment, rollout and learning are compiled together:

    train = scan over iterations of [rollout -> compute_gae -> update]

Shapes are written with T steps, N environments, B = T * N samples, A actions and O
numbers in an observation. ppo_eqx.py (Equinox) and ppo_flax.py (Flax) are the same
program in two libraries: diff them.

PPO: https://arxiv.org/abs/1707.06347
GAE: https://arxiv.org/abs/1506.02438
CleanRL's ppo.py: https://docs.cleanrl.dev/rl-algorithms/ppo/
Why each detail: https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
"""

import dataclasses
import functools
from importlib.metadata import version
import math
import os
import pathlib
import platform
import tempfile
import textwrap
import time
from typing import Any, Literal, NamedTuple

import flax
import flax.linen as nn
from flax.training.train_state import TrainState
import gymnax
from gymnax.environments import spaces
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro


@functools.cache
def make_env(env_id):
    """Gymnax environment with flat observations and episode statistics in `info`.

    Raises ValueError for one that cannot be trained on here. `Args` calls this first,
    outside jit: arrays made while tracing must not get into the cache.
    """
    if env_id not in gymnax.registered_envs:
        known = ", ".join(gymnax.registered_envs)
        raise ValueError(f"--env-id {env_id} is unknown, gymnax has: {known}")
    try:
        env, env_params = gymnax.make(env_id)
        if not isinstance(env.action_space(env_params), spaces.Discrete):
            raise ValueError("its actions are not discrete")
        if not isinstance(env.observation_space(env_params), spaces.Box):
            raise ValueError("its observations are not arrays")
        env = LogWrapper(FlattenObservationWrapper(env))
        # Traces a reset and a step without running them.
        jax.eval_shape(lambda key: reset(env, key[None]), jax.random.key(0))
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--env-id {env_id} does not work here: {reason}") from error
    return env


@dataclasses.dataclass(frozen=True)
class Args:
    """PPO for gymnax environments. The defaults are those of CleanRL's ppo.py."""

    seed: int = 1  # seed of all randomness, 0 to 2^32 - 1
    env_id: str = "CartPole-v1"  # gymnax environment with discrete actions
    total_timesteps: int = 500_000  # environment steps, at least one batch
    learning_rate: float = 2.5e-4  # step size of Adam, above 0
    num_envs: int = 4  # N, parallel environments, at least 1
    num_steps: int = 128  # T, steps of each environment in a rollout, at least 1
    anneal_lr: bool = True  # let the learning rate fall linearly to 0
    gamma: float = 0.99  # discount factor, 0 to 1
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation, 0 to 1
    num_minibatches: int = 4  # parts of the batch of N * T samples, at least 1
    update_epochs: int = 4  # passes over each batch, at least 1
    norm_adv: bool = True  # normalize the advantages in each minibatch
    clip_coef: float = 0.2  # how far ratio and value may move per batch, above 0
    clip_vloss: bool = True  # clip the value loss as well
    ent_coef: float = 0.01  # weight of the entropy bonus, at least 0
    vf_coef: float = 0.5  # weight of the value loss, at least 0
    max_grad_norm: float = 0.5  # largest global norm of the gradient, above 0
    activation: Literal["tanh", "relu"] = "tanh"  # of the hidden layers
    bootstrap_truncated: bool = True  # at a time limit, use the value of the last state
    num_reports: int = 16  # lines printed while training, at least 1
    eval_episodes: int = 100  # episodes of each evaluation, at least 1
    save_path: pathlib.Path | None = None  # file for the trained parameters

    def __post_init__(self):
        """Raise ValueError, in one line, for the first value that makes no sense."""
        counts = "total_timesteps num_envs num_steps num_minibatches update_epochs"
        for names, expected, valid in (
            ("seed", "from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32),
            (counts, "at least 1", lambda x: x >= 1),
            ("num_reports eval_episodes", "at least 1", lambda x: x >= 1),
            ("gamma gae_lambda", "from 0 to 1", lambda x: 0 <= x <= 1),
            ("learning_rate clip_coef", "above 0, finite", lambda x: 0 < x < math.inf),
            ("max_grad_norm", "above 0, finite", lambda x: 0 < x < math.inf),
            ("ent_coef vf_coef", "at least 0, finite", lambda x: 0 <= x < math.inf),
        ):
            for name in names.split():
                if not valid(value := getattr(self, name)):
                    flag = "--" + name.replace("_", "-")
                    raise ValueError(f"{flag} must be {expected}, not {value}")
        batch = f"the batch of {self.batch_size} (num_envs x num_steps)"
        if self.total_timesteps < self.batch_size:
            raise ValueError(
                f"--total-timesteps {self.total_timesteps} is below {batch}"
            )
        if self.batch_size % self.num_minibatches:
            raise ValueError(
                f"{self.num_minibatches} minibatches do not divide {batch}"
            )
        if self.norm_adv and self.minibatch_size == 1:
            raise ValueError("minibatches of 1 cannot be normalized: use --no-norm-adv")
        make_env(self.env_id)
        if (path := self.save_path) is not None:
            try:
                if path.is_dir():
                    raise IsADirectoryError(None, "it is a folder")
                tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name).close()
            except OSError as error:
                raise ValueError(f"--save-path {path}: {error.strerror}") from error

    @property
    def batch_size(self):
        return self.num_envs * self.num_steps

    @property
    def minibatch_size(self):
        return self.batch_size // self.num_minibatches

    @property
    def iterations_per_report(self):
        return max(1, self.total_timesteps // self.batch_size // self.num_reports)

    @property
    def num_iterations(self):
        """As many as fit into total_timesteps, in equal reports."""
        most = self.total_timesteps // self.batch_size
        return min(self.num_reports, most) * self.iterations_per_report


def make_mlp(out_size, out_scale, activation):
    """Two hidden layers of 64, orthogonal, zero biases: (..., in) -> (..., out)."""
    layers = []
    for size, scale in ((64, 2**0.5), (64, 2**0.5), (out_size, out_scale)):
        kernel_init = nn.initializers.orthogonal(scale)
        # An nn.Dense computes x @ kernel + bias: kernel (in, out) is the transpose of
        # Equinox's weight. Its dtype stays float32 under JAX_ENABLE_X64 if not given.
        dtype = jnp.result_type(float)
        layers.append(nn.Dense(size, kernel_init=kernel_init, param_dtype=dtype))
        layers.append(getattr(jax.nn, activation))
    return nn.Sequential(layers[:-1])


class ActorCritic(nn.Module):
    """Separate networks: obs (..., O) -> logits (..., A), value (...)."""

    num_actions: int
    activation: str

    # The small scale of the actor's last layer makes the first policy nearly uniform.
    def setup(self):
        self.actor = make_mlp(self.num_actions, 0.01, self.activation)
        self.critic = make_mlp(1, 1.0, self.activation)

    def __call__(self, obs):
        return self.actor(obs), self.critic(obs).squeeze(-1)


def create_train_state(key, obs, num_actions, args):
    """Train state of a new network for observations like obs (N, O)."""
    tx = make_optimizer(args)
    network = ActorCritic(num_actions, args.activation)
    params = network.init(key, obs)
    return TrainState.create(apply_fn=network.apply, params=params, tx=tx)


def make_optimizer(args):
    """Adam with clipped gradients and, if `anneal_lr`, a rate that falls to 0."""
    learning_rate = args.learning_rate
    if args.anneal_lr:
        # The schedule counts gradient steps, not iterations or environment steps.
        steps = args.num_iterations * args.update_epochs * args.num_minibatches
        learning_rate = optax.linear_schedule(args.learning_rate, 0.0, steps)
    return optax.chain(
        optax.clip_by_global_norm(args.max_grad_norm),
        # PPO's usual eps; at the default 1e-8 small gradients make larger steps.
        optax.adam(learning_rate, eps=1e-5),
    )


class Transition(NamedTuple):
    """One step of each environment; `rollout` stacks them to (T, N, ...)."""

    obs: jax.Array  # (N, O)
    action: jax.Array  # (N,)
    log_prob: jax.Array  # (N,) of the action, under the policy that took it
    reward: jax.Array  # (N,)
    terminated: jax.Array  # (N,) the task ended: after this nothing can be earned
    truncated: jax.Array  # (N,) cut by the time limit: more could have been earned
    final_observation: jax.Array  # (N, O) what the step led to, before any reset
    episode_return: jax.Array  # (N,) undiscounted, of the episode that ended, if any

    @property
    def done(self):
        """The episode ended, for either reason, and the next obs is of a new one."""
        return self.terminated | self.truncated


class RunnerState(NamedTuple):
    """What one iteration hands to the next."""

    train_state: TrainState
    env_state: Any  # a gymnax state, (N, ...)
    obs: jax.Array  # (N, O)
    key: jax.Array


def reset(env, keys):
    """Reset one environment per key (N,): obs (N, O), env_state."""
    obs, env_state = jax.vmap(env.reset)(keys)
    # In some environments step changes the types that reset gave (a Python 0 becomes an
    # array, float32 becomes float64), but the carry of a scan must keep its types.
    action = jnp.zeros(len(keys), int)
    like = jax.eval_shape(jax.vmap(env.step), keys, env_state, action)[:2]
    return jax.tree.map(lambda x, y: x.astype(y.dtype), (obs, env_state), like)


def rollout(runner_state, args):
    """Take T steps in N environments: runner state, transitions (T, N, ...)."""
    env = make_env(args.env_id)
    train_state, env_state, obs, key = runner_state
    action_key, step_key, key = jax.random.split(key, 3)
    # All keys are split at once: cheaper than a split in every step.
    action_keys = jax.random.split(action_key, args.num_steps)
    step_keys = jax.random.split(step_key, (args.num_steps, args.num_envs))

    def step(carry, keys):
        env_state, obs = carry
        action_key, step_keys = keys
        # XLA removes the critic here, as nothing uses its value.
        logits, _ = train_state.apply_fn(train_state.params, obs)
        action = jax.random.categorical(action_key, logits)
        log_prob = jax.nn.log_softmax(logits)[jnp.arange(args.num_envs), action]
        # next_obs is the first of a new episode where this one ended.
        next_obs, env_state, reward, terminated, truncated, info = jax.vmap(env.step)(
            step_keys, env_state, action
        )
        transition = Transition(
            obs=obs,
            action=action,
            log_prob=log_prob,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            final_observation=info["final_observation"],
            episode_return=info["returned_episode_returns"],
        )
        return (env_state, next_obs), transition

    carry, transitions = jax.lax.scan(step, (env_state, obs), (action_keys, step_keys))
    return RunnerState(train_state, *carry, key), transitions


def compute_gae(transitions, values, final_values, args):
    """Generalized advantage estimation, equation 16 of the GAE paper, as a recursion.

        delta_t = reward_t + gamma * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * A_{t+1}

    without V(s_{t+1}) if step t terminated, without A_{t+1} if it is done. Takes the
    values (T + 1, N) of all observations and those (T, N) of the final observations.
    Returns the advantages and A + V, the targets of the value function, (T, N) each.
    """
    # At a time limit, values[t + 1] is of a new episode. The state that was cut off is
    # the final observation, worth what could have been earned from there.
    next_values = jnp.where(transitions.truncated, final_values, values[1:])
    failed = transitions.terminated if args.bootstrap_truncated else transitions.done
    next_values = jnp.where(failed, 0.0, next_values)
    deltas = transitions.reward + args.gamma * next_values - values[:-1]
    decays = args.gamma * args.gae_lambda * (1.0 - transitions.done)

    def step_back(next_advantage, x):
        delta, decay = x
        advantage = delta + decay * next_advantage
        return advantage, advantage

    _, advantages = jax.lax.scan(
        step_back, jnp.zeros_like(deltas[0]), (deltas, decays), reverse=True
    )
    return advantages, advantages + values[:-1]


class Batch(NamedTuple):
    """Samples to learn from, (B, ...), or a minibatch of them."""

    obs: jax.Array  # (B, O)
    action: jax.Array  # (B,)
    log_prob: jax.Array  # (B,) under the policy of the rollout
    value: jax.Array  # (B,) under the value function of the rollout
    advantage: jax.Array  # (B,)
    target: jax.Array  # (B,)


def ppo_loss(params, apply_fn, batch, args):
    """Loss () of PPO, equation 9 of the PPO paper, and its parts, over a minibatch."""
    logits, value = apply_fn(params, batch.obs)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, batch.action[:, None], axis=1)[:, 0]
    log_ratio = log_prob - batch.log_prob
    ratio = jnp.exp(log_ratio)

    advantage = batch.advantage
    if args.norm_adv:
        # Per minibatch, as CleanRL does, not once per batch.
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    # Equation 7, with the sign of a loss.
    clipped_ratio = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -jnp.minimum(ratio * advantage, clipped_ratio * advantage).mean()

    # Both (B,): with a value (B, 1) the difference would be (B, B), without an error.
    value_error = jnp.square(value - batch.target)
    if args.clip_vloss:
        value_change = jnp.clip(value - batch.value, -args.clip_coef, args.clip_coef)
        clipped_error = jnp.square(batch.value + value_change - batch.target)
        value_error = jnp.maximum(value_error, clipped_error)
    value_loss = 0.5 * value_error.mean()

    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    return loss, {
        "loss": loss,
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        # The estimator k3 of http://joschu.net/blog/kl-approx.html: never negative.
        "approx_kl": ((ratio - 1) - log_ratio).mean(),
        "clip_fraction": (jnp.abs(ratio - 1) > args.clip_coef).mean(),
    }


def update(train_state, batch, key, args):
    """Epochs of minibatches: the new train state and the mean of the loss's parts."""
    # A new permutation (B,) for each epoch, cut into minibatches of indices.
    keys = jax.random.split(key, args.update_epochs)
    permutations = jax.vmap(jax.random.permutation, (0, None))(keys, args.batch_size)
    minibatches = permutations.reshape(-1, args.minibatch_size)

    def gradient_step(train_state, indices):
        minibatch = jax.tree.map(lambda x: x[indices], batch)
        grads, metrics = jax.grad(ppo_loss, has_aux=True)(
            train_state.params, train_state.apply_fn, minibatch, args
        )
        return train_state.apply_gradients(grads=grads), metrics

    train_state, metrics = jax.lax.scan(gradient_step, train_state, minibatches)
    return train_state, jax.tree.map(jnp.mean, metrics)


def init(key, args):
    """Runner state before the first iteration. Jit it: outside it takes seconds."""
    env = make_env(args.env_id)
    network_key, reset_key, key = jax.random.split(key, 3)
    obs, env_state = reset(env, jax.random.split(reset_key, args.num_envs))
    num_actions = env.action_space(env.default_params).n
    train_state = create_train_state(network_key, obs, num_actions, args)
    return RunnerState(train_state, env_state, obs, key)


def train(runner_state, args, num_iterations):
    """Iterations of rollout and update: runner state, metrics (num_iterations,) each.

    Pure: jit it with static args and num_iterations, map it over stacked runner states.
    """

    def iteration(runner_state, _):
        runner_state, transitions = rollout(runner_state, args)
        train_state, _, last_obs, key = runner_state
        # Two large batches cost a fraction of what a critic in each step would.
        all_obs = jnp.concatenate([transitions.obs, last_obs[None]])
        final_obs = transitions.final_observation
        _, values = train_state.apply_fn(train_state.params, all_obs)
        _, final_values = train_state.apply_fn(train_state.params, final_obs)
        advantages, targets = compute_gae(transitions, values, final_values, args)
        batch = Batch(
            obs=transitions.obs,
            action=transitions.action,
            log_prob=transitions.log_prob,
            value=values[:-1],
            advantage=advantages,
            target=targets,
        )
        batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)
        update_key, key = jax.random.split(key)
        train_state, metrics = update(train_state, batch, update_key, args)
        # No episode ended: no return. NaN says so, 0 would look like a dip.
        returns = jnp.where(transitions.done, transitions.episode_return, jnp.nan)
        metrics["episode_return"] = jnp.nanmean(returns)
        metrics["min_return"] = jnp.nanmin(returns)
        metrics["episodes"] = transitions.done.sum()
        return runner_state._replace(train_state=train_state, key=key), metrics

    return jax.lax.scan(iteration, runner_state, length=num_iterations)


def evaluate(train_state, key, args, greedy):
    """Undiscounted returns of new episodes (eval_episodes,), one in each environment.

    `greedy` takes the most probable action, otherwise actions are sampled.
    """
    env = make_env(args.env_id)
    reset_key, key = jax.random.split(key)
    obs, env_state = reset(env, jax.random.split(reset_key, args.eval_episodes))

    def step(carry):
        obs, env_state, key, returns, finished = carry
        action_key, step_key, key = jax.random.split(key, 3)
        logits, _ = train_state.apply_fn(train_state.params, obs)
        sampled_action = jax.random.categorical(action_key, logits)
        action = jnp.where(greedy, logits.argmax(axis=1), sampled_action)
        obs, env_state, _, terminated, truncated, info = jax.vmap(env.step)(
            jax.random.split(step_key, args.eval_episodes), env_state, action
        )
        # The environments start over by themselves; only first episodes count.
        returns = jnp.where(finished, returns, info["returned_episode_returns"])
        return obs, env_state, key, returns, finished | terminated | truncated

    returns = env_state.returned_episode_returns
    carry = (obs, env_state, key, returns, jnp.zeros(args.eval_episodes, bool))
    carry = jax.lax.while_loop(lambda carry: ~carry[-1].all(), step, carry)
    return carry[-2]


def save(path, train_state):
    """Write the parameters to a temporary file, then rename it: never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(flax.serialization.to_bytes(train_state.params))
    os.replace(temporary, path)


def print_settings(args):
    """Print versions, device and arguments."""
    libraries = ("jax", "flax", "optax", "gymnax")
    versions = [f"{library} {version(library)}" for library in libraries]
    print(f"Python {platform.python_version()}", *versions, jax.devices()[0], sep=", ")
    print(textwrap.fill(str(args), 88, subsequent_indent="     "))
    steps = args.num_iterations * args.batch_size
    print(f"{args.num_iterations} iterations of {args.batch_size} steps: {steps} steps")
    if dropped := args.total_timesteps // args.batch_size - args.num_iterations:
        print(
            f"({dropped} more would fit, but not in {args.num_reports} equal reports)"
        )


LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def report(step, metrics, steps_per_second):
    """Print a line on the metrics (iterations_per_report,) of one call of `train`."""
    metrics = jax.device_get(metrics)
    returns = f"{'-':>8}{'-':>8}"
    if (ended := metrics["episodes"] > 0).any():
        weights = metrics["episodes"][ended]
        mean_return = np.average(metrics["episode_return"][ended], weights=weights)
        returns = f"{mean_return:8.1f}{metrics['min_return'][ended].min():8.1f}"
    losses = [f"{metrics[name].mean():{len(name)}.4f}" for name in LOSSES]
    print(f"{step:8}{returns}", *losses, f"{steps_per_second:8.0f}", flush=True)


def main(args):
    """Train, report, save and evaluate."""
    print_settings(args)
    start = time.perf_counter()
    jitted_init = jax.jit(init, static_argnames="args")
    runner_state = jax.block_until_ready(jitted_init(jax.random.key(args.seed), args))
    init_seconds = time.perf_counter() - start
    start = time.perf_counter()
    jitted_train = jax.jit(train, static_argnames=("args", "num_iterations"))
    lowered_train = jitted_train.lower(runner_state, args, args.iterations_per_report)
    compiled_train = lowered_train.compile()
    compile_seconds = time.perf_counter() - start
    print(f"init {init_seconds:.1f} s, compile {compile_seconds:.1f} s")

    print(f"{'step':>8}{'return':>8}{'min':>8}", *LOSSES, f"{'steps/s':>8}", flush=True)
    chunk_steps = args.iterations_per_report * args.batch_size
    steps, run_seconds = 0, 0.0
    for _ in range(args.num_iterations // args.iterations_per_report):
        start = time.perf_counter()
        runner_state, metrics = jax.block_until_ready(compiled_train(runner_state))
        seconds = time.perf_counter() - start
        steps, run_seconds = steps + chunk_steps, run_seconds + seconds
        report(steps, metrics, chunk_steps / seconds)
    print(f"run {run_seconds:.1f} s, {steps / run_seconds:.0f} environment steps/s")

    if args.save_path is not None:
        save(args.save_path, runner_state.train_state)
    jitted_evaluate = jax.jit(evaluate, static_argnames="args")
    greedy_key, sampled_key = jax.random.split(runner_state.key)
    for name, key in (("greedy", greedy_key), ("sampled", sampled_key)):
        returns = jitted_evaluate(runner_state.train_state, key, args, name == "greedy")
        print(
            f"{args.eval_episodes} {name} episodes: return {returns.mean():.1f} "
            f"+- {returns.std():.1f}, min {returns.min():.1f}"
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
