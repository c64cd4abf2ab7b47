# /// script
# requires-python = ">=3.11"
# dependencies = [  # gymnax 1.0.1 imports six and does not declare it
#     "jax>=0.10,<0.12", "optax>=0.2.6,<0.3", "gymnax>=1.0.1,<1.1", "six>=1.16,<2",
#     "tyro>=1.0.16,<1.1", "flax>=0.12.7,<0.13",
# ]
# ///
"""Proximal Policy Optimization (PPO) in JAX: one file, one jitted program.

    python ppo_flax.py --seed 1

Shapes: T steps, N environments, B = T * N samples, A actions, O numbers in an
observation. ppo_eqx.py (Equinox) and ppo_flax.py (Flax) are one program: diff them.

PPO: https://arxiv.org/abs/1707.06347
GAE: https://arxiv.org/abs/1506.02438
CleanRL's ppo.py: https://docs.cleanrl.dev/rl-algorithms/ppo/
Why each detail: https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
"""

from dataclasses import dataclass, field
import functools
import math
import os
import pathlib
import sys
import time
from typing import Any, Literal, NamedTuple

from flax import linen as nn
from flax import serialization
from flax.training.train_state import TrainState
import gymnax
from gymnax.environments import spaces
from gymnax.wrappers import FlattenObservationWrapper, LogWrapper
import jax
import jax.numpy as jnp
import optax
import tyro


@dataclass(frozen=True)
class Args:
    """PPO for gymnax environments. The defaults are those of CleanRL's ppo.py."""

    # Not compared: of another seed, the arguments are equal and nothing compiles again.
    seed: int = field(default=1, compare=False)  # seed of all randomness, 0 to 2^32 - 1
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
    num_reports: int = 16  # lines printed while training, at most; at least 1
    eval_episodes: int = 100  # episodes of each evaluation, at least 1
    save_path: pathlib.Path | None = None  # file for the trained parameters

    batch_size = property(lambda self: self.num_envs * self.num_steps)
    num_iterations = property(lambda self: self.total_timesteps // self.batch_size)

    def __post_init__(self):
        """Raise ValueError, in one line, for the first value that makes no sense."""
        size = self.batch_size
        batch = f"the batch of {size} (num_envs x num_steps)"
        for flags, expected, valid in (
            ("seed", "from 0 to 2^32 - 1", lambda x: 0 <= x < 2**32),
            ("num-envs num-steps num-minibatches", "at least 1", lambda x: x >= 1),
            ("update-epochs num-reports eval-episodes", "at least 1", lambda x: x >= 1),
            ("total-timesteps", f"at least {batch}", lambda x: x >= size),
            ("num-minibatches", f"a divisor of {batch}", lambda x: size % x == 0),
            ("gamma gae-lambda", "from 0 to 1", lambda x: 0 <= x <= 1),
            ("ent-coef vf-coef", "at least 0, finite", lambda x: 0 <= x < math.inf),
            ("learning-rate", "above 0, finite", lambda x: 0 < x < math.inf),
            ("clip-coef max-grad-norm", "above 0, finite", lambda x: 0 < x < math.inf),
        ):
            for flag in flags.split():
                if not valid(value := getattr(self, flag.replace("-", "_"))):
                    raise ValueError(f"--{flag} must be {expected}, not {value}")
        if self.norm_adv and size == self.num_minibatches:
            raise ValueError("minibatches of 1 cannot be normalized: use --no-norm-adv")


def make_mlp(out_size, out_scale, activation):
    """Two hidden layers of 64: (..., in_size) -> (..., out_size)."""
    # An nn.Dense computes x @ kernel + bias: kernel (in, out) is the transpose of
    # Equinox's weight. Under JAX_ENABLE_X64 its default dtype is still float32.
    dense = functools.partial(nn.Dense, param_dtype=jnp.result_type(float))
    layers = []
    for size, scale in ((64, 2**0.5), (64, 2**0.5), (out_size, out_scale)):
        layers.append(dense(size, kernel_init=nn.initializers.orthogonal(scale)))
        layers.append(getattr(jax.nn, activation))
    return nn.Sequential(layers[:-1])


class ActorCritic(nn.Module):
    """Separate networks: obs (..., O) -> logits (..., A), value (...)."""

    # The small scale of the actor's last layer makes the first policy nearly uniform.
    num_actions: int
    activation: str

    def setup(self):
        self.actor = make_mlp(self.num_actions, 0.01, self.activation)
        self.critic = make_mlp(1, 1.0, self.activation)

    def __call__(self, obs):
        return self.actor(obs), self.critic(obs).squeeze(-1)


make_network = functools.cache(ActorCritic)  # so that apply_fn is always the same


# Cached: train states of the same settings have the same optimizer, also for jax.jit.
@functools.cache
def make_optimizer(args):
    """Adam with clipped gradients and, if `anneal_lr`, a rate that falls to 0."""
    learning_rate = args.learning_rate
    if args.anneal_lr:
        # The schedule counts gradient steps, not iterations or environment steps.
        steps = args.num_iterations * args.update_epochs * args.num_minibatches
        learning_rate = optax.linear_schedule(args.learning_rate, 0.0, steps)
    clip = optax.clip_by_global_norm(args.max_grad_norm)
    # PPO's usual eps; at the default 1e-8 small gradients make larger steps.
    return optax.chain(clip, optax.adam(learning_rate, eps=1e-5))


class Transition(NamedTuple):
    """One step of each environment; `rollout` stacks them to (T, N, ...)."""

    obs: jax.Array  # (N, O) s_t
    action: jax.Array  # (N,) a_t
    log_prob: jax.Array  # (N,) of the action, under the policy that took it
    reward: jax.Array  # (N,) r_t
    next_obs: jax.Array  # (N, O) s_{t+1}: what the step led to, before any reset
    terminated: jax.Array  # (N,) the task ended: after this nothing can be earned
    done: jax.Array  # (N,) the episode ended, for that reason or by its time limit
    episode_return: jax.Array  # (N,) undiscounted, of the episode that ended, if any


class RunnerState(NamedTuple):
    """What one iteration hands to the next."""

    train_state: TrainState
    env_state: Any  # a gymnax state, (N, ...)
    obs: jax.Array  # (N, O)
    key: jax.Array


def log_prob_and_entropy(logits, action):
    """Of logits (..., A): log-probability of action (...), entropy; (...) each."""
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, action[..., None], axis=-1)[..., 0]
    return log_prob, -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def rollout(runner_state, env, args, greedy=False):
    """Take T steps in N environments: runner state, steps (T, N, ...)."""
    train_state, env_state, obs, key = runner_state
    noise_key, step_key, key = jax.random.split(key, 3)
    # All keys are split at once: cheaper than a split in every step.
    step_keys = jax.random.split(step_key, (args.num_steps, len(obs)))
    # The argmax of logits and Gumbel noise is a sample of the categorical distribution,
    # just as jax.random.categorical takes it. With the noise of all steps drawn at once
    # the whole training is 2 to 3 % faster. Without noise, it is the most probable one.
    num_actions = env.action_space(env.default_params).n
    noise = jax.random.gumbel(noise_key, (*step_keys.shape, num_actions))
    noise = jnp.where(greedy, 0.0, noise)

    def step(carry, x):
        env_state, obs = carry
        step_keys, noise = x
        # XLA removes the critic here, as nothing uses its value.
        logits, _ = train_state.apply_fn(train_state.params, obs)
        action = (logits + noise).argmax(-1)
        log_prob, _ = log_prob_and_entropy(logits, action)
        results = jax.vmap(env.step)(step_keys, env_state, action)
        # Where an episode ended, new_obs is already the first of the next one.
        new_obs, env_state, reward, terminated, truncated, info = results
        next_obs = info["final_observation"]
        done = terminated | truncated
        episode_return = info["returned_episode_returns"]
        transition = Transition(
            obs, action, log_prob, reward, next_obs, terminated, done, episode_return
        )
        return (env_state, new_obs), transition

    carry, steps = jax.lax.scan(step, (env_state, obs), (step_keys, noise))
    return RunnerState(train_state, *carry, key), steps


def compute_gae(reward, value, next_value, done, gamma, gae_lambda):
    """Generalized advantage estimation, equation 16 of the GAE paper, as a recursion.

        delta_t = reward_t + gamma * V(s_{t+1}) - V(s_t)
        A_t     = delta_t + gamma * lambda * A_{t+1}

    without A_{t+1} if the episode is done at t. Arrays (T, N) -> advantages (T, N).
    next_value is V(s_{t+1}), before any reset, and 0 where nothing more can be earned.
    """
    deltas = reward + gamma * next_value - value
    decays = gamma * gae_lambda * (1.0 - done)

    def step_back(next_advantage, x):
        delta, decay = x
        advantage = delta + decay * next_advantage
        return advantage, advantage

    last = jnp.zeros_like(deltas[0])
    _, advantages = jax.lax.scan(step_back, last, (deltas, decays), reverse=True)
    return advantages


class Batch(NamedTuple):
    """Samples to learn from, (B, ...), or a minibatch of them."""

    obs: jax.Array  # (B, O)
    action: jax.Array  # (B,)
    log_prob: jax.Array  # (B,) under the policy of the rollout
    value: jax.Array  # (B,) under the value function of the rollout
    advantage: jax.Array  # (B,)
    target: jax.Array  # (B,) of the value function


def make_batch(params, apply_fn, steps, args):
    """Batch (B, ...) of the steps (T, N, ...) of a rollout."""
    # Two large batches cost a fraction of what a critic in each step would.
    network = functools.partial(apply_fn, params)
    _, value = network(steps.obs)
    _, next_value = network(steps.next_obs)
    # A time limit is no failure: there, more could have been earned from next_obs on.
    failed = steps.terminated if args.bootstrap_truncated else steps.done
    next_value = jnp.where(failed, 0.0, next_value)
    advantage = compute_gae(
        steps.reward, value, next_value, steps.done, args.gamma, args.gae_lambda
    )
    target = advantage + value
    batch = Batch(steps.obs, steps.action, steps.log_prob, value, advantage, target)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batch)


def ppo_loss(params, apply_fn, batch, args):
    """Loss () of PPO, equation 9 of the PPO paper, and its parts, over a minibatch."""
    logits, value = apply_fn(params, batch.obs)
    log_prob, entropy = log_prob_and_entropy(logits, batch.action)
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
    entropy = entropy.mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    # The estimator k3 of http://joschu.net/blog/kl-approx.html: never negative.
    approx_kl = ((ratio - 1) - log_ratio).mean()
    clip_fraction = (jnp.abs(ratio - 1) > args.clip_coef).mean()
    metrics = dict(loss=loss, policy_loss=policy_loss, value_loss=value_loss)
    metrics |= dict(entropy=entropy, approx_kl=approx_kl, clip_fraction=clip_fraction)
    return loss, metrics


def update(train_state, batch, key, args):
    """Epochs of minibatches: the new train state and the mean of the loss's parts."""
    # A new permutation (B,) for each epoch, cut into minibatches of indices.
    keys = jax.random.split(key, args.update_epochs)
    permutations = jax.vmap(jax.random.permutation, (0, None))(keys, args.batch_size)
    minibatches = permutations.reshape(args.update_epochs * args.num_minibatches, -1)

    def gradient_step(train_state, indices):
        minibatch = jax.tree.map(lambda x: x[indices], batch)
        grad = jax.grad(ppo_loss, has_aux=True)
        grads, metrics = grad(train_state.params, train_state.apply_fn, minibatch, args)
        return train_state.apply_gradients(grads=grads), metrics

    train_state, metrics = jax.lax.scan(gradient_step, train_state, minibatches)
    return train_state, jax.tree.map(jnp.mean, metrics)


def init(key, env, args):
    """Runner state before the first iteration. Jit it: outside it takes seconds."""
    network_key, reset_key, key = jax.random.split(key, 3)
    obs, env_state = reset(env, jax.random.split(reset_key, args.num_envs))
    num_actions = env.action_space(env.default_params).n
    tx = make_optimizer(args)
    network = make_network(num_actions, args.activation)
    params = network.init(network_key, obs)
    train_state = TrainState.create(apply_fn=network.apply, params=params, tx=tx)
    return RunnerState(train_state, env_state, obs, key)


def train(runner_state, env, args, num_iterations):
    """Rollouts and updates: runner state, metrics (num_iterations,) each."""

    def iteration(runner_state, _):
        runner_state, steps = rollout(runner_state, env, args)
        train_state = runner_state.train_state
        batch = make_batch(train_state.params, train_state.apply_fn, steps, args)
        update_key, key = jax.random.split(runner_state.key)
        train_state, metrics = update(train_state, batch, update_key, args)
        # No episode ended: no return. NaN says so, 0 would look like a dip.
        returns = jnp.where(steps.done, steps.episode_return, jnp.nan)
        metrics["episode_return"] = jnp.nanmean(returns)
        metrics["min_return"] = jnp.nanmin(returns)
        metrics["episodes"] = steps.done.sum()
        return runner_state._replace(train_state=train_state, key=key), metrics

    return jax.lax.scan(iteration, runner_state, length=num_iterations)


def evaluate(train_state, key, env, args, greedy):
    """Undiscounted returns (eval_episodes,) of new episodes, NaN if one has no end."""
    reset_key, key = jax.random.split(key)
    obs, env_state = reset(env, jax.random.split(reset_key, args.eval_episodes))
    runner_state = RunnerState(train_state, env_state, obs, key)
    # As many rollouts as the longest episode takes.
    length = math.ceil(env.default_params.max_steps_in_episode / args.num_steps)
    step = lambda runner_state, _: rollout(runner_state, env, args, greedy)
    _, steps = jax.lax.scan(step, runner_state, length=length)
    # The environments start over by themselves; only first episodes count.
    done = steps.done.reshape(-1, args.eval_episodes)
    returns = jnp.where(done, steps.episode_return.reshape(done.shape), jnp.nan)
    return jnp.take_along_axis(returns, done.argmax(0, keepdims=True), axis=0)[0]


def make_env(env_id):
    """Gymnax environment as `train` takes it; ValueError for one that does not fit."""
    env, env_params = gymnax.make(env_id)
    if not isinstance(env.action_space(env_params), spaces.Discrete):
        raise ValueError("its actions are not discrete")
    if not isinstance(env.observation_space(env_params), spaces.Box):
        raise ValueError("its observations are not arrays")
    return LogWrapper(FlattenObservationWrapper(env))


def reset(env, keys):
    """Reset one environment per key (N,): obs (N, O), env_state."""
    obs, env_state = jax.vmap(env.reset)(keys)
    # In some environments step changes the types that reset gave (a Python 0 becomes an
    # array, float32 becomes float64), but the carry of a scan must keep its types.
    action = jnp.zeros(len(keys), int)
    like = jax.eval_shape(jax.vmap(env.step), keys, env_state, action)[:2]
    return jax.tree.map(lambda x, y: x.astype(y.dtype), (obs, env_state), like)


def save(path, train_state):
    """Write the parameters to a temporary file, then rename it: never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(serialization.to_bytes(train_state.params))
    os.replace(temporary, path)


LOSSES = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def report(step, metrics, steps_per_second):
    """Print a line on the metrics (num_iterations,) of one call of `train`."""
    metrics = jax.device_get(metrics)
    # Each episode counts once, and an iteration in which none ended not at all.
    returns = metrics["episode_return"].repeat(metrics["episodes"])
    lowest = metrics["min_return"].repeat(metrics["episodes"])
    columns = [f"{'-':>7}"] * 2
    if len(returns):
        columns = [f"{returns.mean():7.1f}", f"{lowest.min():7.1f}"]
    columns += [f"{metrics[name].mean():{len(name)}.4f}" for name in LOSSES]
    print(f"{step:8}", *columns, f"{steps_per_second:8.0f}", flush=True)


def main(args):
    """Train, report, save and evaluate."""
    path = args.save_path
    start = time.perf_counter()
    try:
        if path and (path.is_dir() or not os.access(f"{path.parent}/", os.W_OK)):
            raise OSError(f"--save-path {path}: a folder, or in none that is writable")
        env = make_env(args.env_id)
        jitted_init = jax.jit(init, static_argnums=(1, 2))
        runner_state = jitted_init(jax.random.key(args.seed), env, args)
    except Exception as error:  # some environments fail only when they are traced
        reason = str(error).partition("\n")[0]
        print(f"cannot train {args.env_id}: {reason}", file=sys.stderr)
        sys.exit(2)
    # Equal chunks, and what is left in a shorter one, which compiles once more.
    chunk = math.ceil(args.num_iterations / args.num_reports)
    sizes = [min(chunk, left) for left in range(args.num_iterations, 0, -chunk)]
    jitted_train = jax.jit(train, static_argnums=(1, 2, 3))
    lowered = {n: jitted_train.lower(runner_state, env, args, n) for n in set(sizes)}
    compiled = {n: x.compile() for n, x in lowered.items()}
    print(f"{jax.devices()[0]}: init and compile {time.perf_counter() - start:.1f} s")
    shape = f"{args.num_iterations} iterations of {args.num_envs} x {args.num_steps}"
    print(f"{shape}: {args.num_iterations * args.batch_size} environment steps")
    print(f"{'step':>8} {'return':>7} {'min':>7}", *LOSSES, f"{'steps/s':>8}")
    step, run_seconds = 0, 0.0
    for size in sizes:
        start = time.perf_counter()
        runner_state, metrics = jax.block_until_ready(compiled[size](runner_state))
        run_seconds += time.perf_counter() - start
        step += size * args.batch_size
        report(step, metrics, step / run_seconds)
    print(f"run {run_seconds:.1f} s, {step / run_seconds:.0f} environment steps/s")
    if path:
        save(path, runner_state.train_state)
    jitted_evaluate = jax.jit(evaluate, static_argnums=(2, 3))
    for key, name in zip(jax.random.split(runner_state.key), ("greedy", "sampled")):
        inputs = (runner_state.train_state, key, env, args, name == "greedy")
        x = jax.device_get(jitted_evaluate(*inputs))
        returns = f"{x.mean():.1f} +- {x.std():.1f}, min {x.min():.1f}"
        print(f"{len(x)} {name} episodes: return {returns}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args))
    except KeyboardInterrupt:
        sys.exit("interrupted")
