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
"""Both scripts on the same seeds from the same weights: where they part, and how far.

    python compare.py
    python compare.py --num-seeds 32 --variants flax equinox

Equinox makes the initial weights, Flax gets them transposed; all keys are the same.
Writes returns.csv, summary.md (what it prints) and compare.png to a folder of its own.
Shapes are written as in the scripts, with S seeds and I iterations.
"""

import dataclasses
import functools
from importlib.metadata import version
import io
import math
import os
from pathlib import Path
import platform
import shlex
import sys
import time
from typing import Literal, get_args

import equinox as eqx
import jax
from jax.experimental.multihost_utils import process_allgather
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from matplotlib.figure import Figure
import numpy as np
import tyro

# One CPU device per core; before gymnax, whose import starts JAX's backend.
jax.config.update("jax_num_cpu_devices", os.cpu_count())


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Flags for several processes: the same command in each, but for --process-id."""

    distributed: bool = False  # this is one of the processes of a Slurm, MPI or TPU job
    coordinator_address: str | None = None  # HOST:PORT on the machine of process 0
    num_processes: int | None = None  # processes in all, at least 1
    process_id: int | None = None  # 0 to num_processes - 1

    def __post_init__(self):
        """Raise ValueError, in one line, if the flags do not go together."""
        flags = (self.coordinator_address, self.num_processes, self.process_id)
        if flags == (None, None, None):
            return
        if None in flags or self.distributed:
            raise ValueError(
                "--coordinator-address, --num-processes and --process-id go together, "
                "and not with --distributed"
            )
        if not self.coordinator_address.rpartition(":")[2].isdecimal():
            raise ValueError("--coordinator-address must be HOST:PORT")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError("--process-id must be from 0 to num_processes - 1")


if __name__ == "__main__":
    cluster, _ = tyro.cli(Cluster, return_unknown_args=True, add_help=False)
    if cluster.distributed or cluster.coordinator_address:
        address, number, index = list(vars(cluster).values())[1:]
        try:
            jax.distributed.initialize(address, number, index)
        except (RuntimeError, ValueError) as error:
            sys.exit(f"the processes did not find each other: {error}")

import ppo_eqx  # noqa: E402
import ppo_flax  # noqa: E402

MESH, LANES = Mesh(jax.devices(), "seeds"), PartitionSpec("seeds")
LOSSES = ("loss", *ppo_eqx.LOSSES)
METRICS = ("episode_return", "min_return", "episodes", *LOSSES)
Variant = Literal["flax", "equinox", "equinox-flax-order", "equinox-no-opt-state"]
make_env = functools.cache(ppo_eqx.make_env)
COLORS = dict(zip(get_args(Variant), ("#0072B2", "#E69F00", "#000000", "#009E73")))


@dataclasses.dataclass(frozen=True)
class Args(ppo_eqx.Args, Cluster):
    """Run both scripts on the same seeds from the same weights and compare them."""

    num_seeds: int = 8  # S, seeds from --seed on, at least 1
    variants: tuple[Variant, ...] = get_args(Variant)  # what to run, in this order
    output_dir: Path | None = None  # a new folder; results/<date-time> if not given
    plot_only: bool = False  # only draw the figure again, in the --output-dir of a run
    save_path: tyro.conf.Suppress[tyro.conf.Fixed[None]] = None

    def __post_init__(self):
        """Raise ValueError, in one line, for the first value that makes no sense."""
        ppo_eqx.Args.__post_init__(self)
        make_env(self.env_id)
        Cluster.__post_init__(self)
        if not 1 <= self.num_seeds <= 2**32 - self.seed:
            raise ValueError(
                f"--num-seeds must be from 1 to 2^32 - seed, not {self.num_seeds}"
            )
        if not self.variants or len(set(self.variants)) < len(self.variants):
            raise ValueError("--variants needs at least one, and each only once")
        if self.plot_only and not self.output_dir:
            raise ValueError("--plot-only needs the --output-dir of a run")


class FlaxOrderLinear(eqx.Module):
    """An eqx.nn.Linear with the arithmetic of flax.linen.Dense, in the same order."""

    # Leaves in Flax's order, of names, as clip_by_global_norm sums leaf by leaf.
    bias: jax.Array
    kernel: jax.Array

    def __init__(self, linear):
        self.bias, self.kernel = linear.bias, linear.weight.T

    def __call__(self, x, *, key=None):
        return x @ self.kernel + self.bias


class NoOptState(ppo_eqx.TrainState):
    """The bug of the report: the optimizer state does not come back out."""

    def apply_gradients(self, *, grads):
        train_state = super().apply_gradients(grads=grads)
        return NoOptState(train_state.model, self.opt_state, self.tx)


def flax_layout(params):
    """Parameters or gradients of either library as Flax has them; seeds may lead."""
    if not isinstance(params, ppo_eqx.ActorCritic):
        return params
    tree = {"actor": {}, "critic": {}}
    for name, layers in tree.items():
        for i, layer in enumerate(getattr(params, name).layers):
            if isinstance(layer, FlaxOrderLinear):
                kernel = layer.kernel
            else:
                kernel = jnp.swapaxes(layer.weight, -1, -2)
            layers[f"layers_{2 * i}"] = {"kernel": kernel, "bias": layer.bias}
    return {"params": tree}


@functools.partial(jax.jit, static_argnames=("variant", "args"))
def init(key, variant, args):
    """Runner state of a variant: of one key, all have the same weights and the rest."""
    env = make_env(args.env_id)
    runner_state = ppo_eqx.init(key, env, args)
    train_state = runner_state.train_state
    if variant == "flax":
        params = flax_layout(train_state.model)
        runner_state = ppo_flax.init(key, env, args)
        train_state = runner_state.train_state.replace(params=params)
    elif variant == "equinox-flax-order":
        layers = lambda model: (*model.actor.layers, *model.critic.layers)
        model = eqx.tree_at(layers, train_state.model, replace_fn=FlaxOrderLinear)
        tx = train_state.tx
        train_state = ppo_eqx.TrainState(model, tx.init(model), tx)
    elif variant == "equinox-no-opt-state":
        train_state = NoOptState(**vars(train_state))
    return runner_state._replace(train_state=train_state)


def compile_for_all(function, lanes):
    """Compile a function of one lane to take all, spread over all devices.

    On a CPU each device takes its lanes one after another: faster there than vmap, and
    a lane has exactly the bits of the script alone (but with relu, XLA may round a sum
    otherwise in a program for several devices). Accelerators take them together.
    """
    on_cpu = jax.default_backend() == "cpu"
    several = functools.partial(jax.lax.map, function) if on_cpu else jax.vmap(function)
    specs = dict(in_specs=LANES, out_specs=LANES)
    # Unchecked: the scripts know nothing of meshes, and no lane reads another.
    spread = jax.shard_map(several, mesh=MESH, **specs, check_vma=False)
    return jax.jit(spread).lower(lanes).compile()


def start_lanes(variant, args):
    """Runner states of all seeds, stacked and spread, and how many a device takes."""
    # All devices take equally many: fill up with seeds that are dropped in the end.
    per_device = math.ceil(args.num_seeds / jax.device_count())
    seeds = np.resize(np.arange(args.num_seeds), per_device * jax.device_count())
    # Seed by seed, as orthogonal weights under vmap can hang where there are few cores.
    lanes = [init(jax.random.key(args.seed + int(i)), variant, args) for i in seeds]
    sharding = NamedSharding(MESH, LANES)
    spread = lambda x: jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
    return jax.tree.map(lambda *x: spread(jnp.stack(x)), *lanes), per_device


def run(variant, args):
    """Train and evaluate one lane per seed: metrics (S, I), params, returns, speed."""
    ppo = ppo_flax if variant == "flax" else ppo_eqx
    env = make_env(args.env_id)
    lanes, per_device = start_lanes(variant, args)

    def gather(tree):
        tree = process_allgather(tree, tiled=True)
        return jax.tree.map(lambda x: np.asarray(x)[: args.num_seeds], tree)

    def evaluate(runner_state):
        # With the keys of the script: these are the returns that it prints.
        keys = jax.random.split(runner_state.key)
        one = lambda x: ppo.evaluate(runner_state.train_state, x[0], env, args, x[1])
        return jax.lax.map(one, (keys, jnp.array([True, False])))

    # Equal chunks, so that it compiles once, of about a second, so that progress shows.
    most = max(1, 200_000 // (per_device * args.batch_size))
    chunk = max(n for n in range(1, most + 1) if args.num_iterations % n == 0)
    start = time.perf_counter()
    train = functools.partial(ppo.train, env=env, args=args, num_iterations=chunk)
    train = compile_for_all(train, lanes)
    compile_seconds, start = time.perf_counter() - start, time.perf_counter()
    chunks = []
    for done in range(chunk, args.num_iterations + 1, chunk):
        lanes, metrics = train(lanes)
        chunks.append(gather(metrics))
        run_seconds = time.perf_counter() - start
        speed = done * args.batch_size * args.num_seeds / run_seconds
        number = f"{args.variants.index(variant) + 1} of {len(args.variants)}"
        where = f"iteration {done} of {args.num_iterations}, {speed:.0f} steps/s"
        progress(f"{variant} ({number}): {where}", last=done == args.num_iterations)
    greedy, sampled = gather(compile_for_all(evaluate, lanes)(lanes)).swapaxes(0, 1)
    return dict(
        metrics=jax.tree.map(lambda *x: np.concatenate(x, axis=1), *chunks),
        params=gather(flax_layout(params_of(lanes.train_state))),
        opt_state=gather(lanes.train_state.opt_state),
        greedy=greedy,
        sampled=sampled,
        compile_seconds=compile_seconds,
        run_seconds=run_seconds,
        steps_per_second=speed,
    )


def progress(text, last):
    """Show what runs now: in place on a terminal, else line by line."""
    if jax.process_index() == 0:
        end = "\r" if sys.stderr.isatty() and not last else "\n"
        print(f"{text:<79}", end=end, file=sys.stderr, flush=True)


def run_alone(args):
    """Train the first seed as `python ppo_eqx.py` does: metrics (1, I), steps/s."""
    runner_state = init(jax.random.key(args.seed), "equinox", args)
    train = jax.jit(ppo_eqx.train, static_argnames=("env", "args", "num_iterations"))
    env, chunks = make_env(args.env_id), []
    train = train.lower(runner_state, env, args, args.num_iterations).compile()
    start = time.perf_counter()
    runner_state, metrics = jax.block_until_ready(train(runner_state))
    chunks.append(metrics)
    seconds = time.perf_counter() - start
    metrics = jax.tree.map(lambda *x: np.concatenate(x)[None], *chunks)
    return metrics, args.num_iterations * args.batch_size / seconds


def network(train_state):
    """The function obs (B, O) -> logits (B, A), value (B,), in either library."""
    if isinstance(train_state, ppo_eqx.TrainState):
        return jax.vmap(train_state.model)
    return functools.partial(train_state.apply_fn, train_state.params)


def params_of(train_state):
    """The trained arrays of a train state of either library."""
    return (
        train_state.model if isinstance(train_state, eqx.Module) else train_state.params
    )


def loss_and_grads(train_state, batch, args):
    """Loss (), its parts and the gradients of a minibatch, in either library."""

    def loss(params):
        if isinstance(train_state, ppo_eqx.TrainState):
            return ppo_eqx.ppo_loss(params, batch, args)
        return ppo_flax.ppo_loss(params, train_state.apply_fn, batch, args)

    gradient = jax.value_and_grad(loss, has_aux=True)
    (value, parts), grads = gradient(params_of(train_state))
    return value, parts, grads


@functools.partial(jax.jit, static_argnames=("variant", "args"))
def first_iteration(runner_state, variant, args):
    """The rungs of the parity ladder: what the first iteration computes on its way."""
    env = make_env(args.env_id)
    train_state = runner_state.train_state
    if variant == "flax":
        ppo, model = ppo_flax, (train_state.params, train_state.apply_fn)
    else:
        ppo, model = ppo_eqx, (train_state.model,)
    _, steps = ppo.rollout(runner_state, env, args)
    logits, _ = jax.vmap(network(train_state))(steps.obs)
    batch = ppo.make_batch(*model, steps, args)
    minibatch = jax.tree.map(
        lambda x: x[: args.batch_size // args.num_minibatches], batch
    )
    loss, _, grads = loss_and_grads(train_state, minibatch, args)
    after, _ = ppo.train(runner_state, env, args, 1)
    trees = (params_of(train_state), grads, params_of(after.train_state))
    weights, grads, after = map(flax_layout, trees)
    first_steps = (steps.action, steps.obs, logits, batch.value, batch.advantage)
    return (weights, *first_steps, loss, grads, after)


RUNGS = (
    "initial weights|actions of the first rollout, how many|its observations|its logits"
    "|its values|its advantages|loss of a minibatch|its gradients"
    "|parameters after one iteration|parameters at the end"
).split("|")


def differs(a, b):
    """Where two arrays of one shape and type do not have the same bits."""
    a, b = (np.ascontiguousarray(x).view(f"u{x.itemsize}") for x in (a, b))
    return a != b


def first_difference(a, b, names):
    """The first iteration, from 0, in which metrics (S, I) differ, or "none"."""
    iterations = np.any([differs(a[name], b[name]) for name in names], axis=(0, 1))
    return int(iterations.argmax()) if iterations.any() else "none"


def largest_difference(a, b):
    """The largest absolute difference of two trees; of integers, how many differ."""
    largest = 0.0
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        count = np.issubdtype(x.dtype, np.integer)
        largest = max(largest, np.sum(x != y) if count else np.abs(x - y).max())
    return f"{largest:.2g}"


def table(rows):
    """Rows of cells, the header first, as Markdown."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def parity_ladder(args, results):
    """Markdown: how far Equinox is from Flax, step by step, for the first seed."""
    key = jax.random.key(args.seed)
    variants = [x for x in ("flax", "equinox", "equinox-flax-order") if x in results]
    columns, metrics = [], []
    for variant in variants:
        column = first_iteration(init(key, variant, args), variant, args)
        arrays = results[variant]["params"], results[variant]["metrics"]
        last_params, all_metrics = jax.tree.map(lambda x: x[:1], arrays)
        columns.append((*jax.device_get(column), last_params))
        metrics.append(all_metrics)
    rows = [
        [rung, *(largest_difference(x, column[0]) for x in column[1:])]
        for rung, column in zip(RUNGS, zip(*columns))
    ]
    for what, names in (("metric", METRICS), ("return", METRICS[:1])):
        cells = (first_difference(x, metrics[0], names) for x in metrics[1:])
        rows.insert(-1, [f"first iteration in which a {what} differs", *cells])
    header = [f"seed {args.seed}", *(f"{x} against flax" for x in variants[1:])]
    return table([header, *rows])


def verdict(args, results):
    """Whether equinox-flax-order is flax to the bit, and if not, from where on."""
    a, b = results["equinox-flax-order"], results["flax"]
    first = first_difference(a["metrics"], b["metrics"], METRICS)
    leaves = zip(jax.tree.leaves(a["params"]), jax.tree.leaves(b["params"]))
    params = sum(differs(x, y).sum() for x, y in leaves)
    if first == "none" and not params:
        return (
            f"equinox-flax-order is flax bit for bit, for all {args.num_seeds} seeds: "
            "every metric of every iteration and every final parameter."
        )
    return (
        "equinox-flax-order is NOT flax bit for bit: the first iteration in which a "
        f"metric differs is {first}, and {params} final parameters differ."
    )


def mean_returns(metrics, size):
    """Mean return (S, bins) of the episodes in each `size` iterations, NaN if none."""
    starts = np.arange(0, metrics["episodes"].shape[1], size)
    sums = np.nan_to_num(metrics["episode_return"]) * metrics["episodes"]
    sums = np.add.reduceat(sums, starts, axis=1)
    counts = np.add.reduceat(metrics["episodes"], starts, axis=1)
    return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)


def results_table(args, results):
    """Markdown: the last tenth of the iterations, milestones, evaluation and speed."""
    header = "variant|return, last 10 % (95 % interval)|seeds locked|lowest episode"
    header += "|475 at step|none below 500 from step|sampled|greedy"
    rows = [f"{header}|compile s|run s|steps/s".split("|")]
    steps = args.batch_size * np.arange(1, args.num_iterations + 1)
    tail = max(1, args.num_iterations // 10)
    # Bootstrap: seeds that one might as well have had, the same for all variants.
    shape = (10_000, args.num_seeds)
    resampled = np.random.default_rng(0).integers(args.num_seeds, size=shape)
    for variant, result in results.items():
        metrics = result["metrics"]
        last = {name: x[:, -tail:] for name, x in metrics.items()}
        returns = mean_returns(last, tail)[:, 0]
        low, high = np.percentile(returns[resampled].mean(axis=1), [2.5, 97.5])
        lowest = np.fmin.reduce(last["min_return"], axis=1)
        reached = np.where(metrics["episode_return"] >= 475, steps, np.inf).min(axis=1)
        dips = np.where(metrics["min_return"] < 500, steps, 0).max(axis=1)
        medians = np.median([reached, np.where(lowest < 500, np.inf, dips)], axis=1)
        row = [variant, f"{returns.mean():.1f} ({low:.1f} to {high:.1f})"]
        row += [f"{np.sum(lowest >= 500)}/{len(lowest)}", f"{lowest.min():.0f}"]
        row += [f"{x:.0f}".replace("inf", "never") for x in medians]
        row += [f"{result[x].mean():.1f}" for x in ("sampled", "greedy")]
        row += [f"{result[x]:.1f}" for x in ("compile_seconds", "run_seconds")]
        rows.append([*row, f"{result['steps_per_second']:.0f}"])
    return table(rows)


def summary(args, results):
    """Markdown: what ran where, the results, and where Equinox and Flax part."""
    libraries = ("jax", "equinox", "flax", "optax", "gymnax")
    versions = [f"{library} {version(library)}" for library in libraries]
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    machine = [f"Python {platform.python_version()}", *versions, devices]
    parts = [", ".join([*machine, f"{os.cpu_count()} cores"])]
    parts += [f"`python {shlex.join(sys.argv)}`", results_table(args, results)]
    if "equinox" in results:
        metrics, speed = run_alone(args)
        lane = {name: x[:1] for name, x in results["equinox"]["metrics"].items()}
        same = first_difference(lane, metrics, METRICS) == "none"
        ratio = results["equinox"]["steps_per_second"] / speed
        parts.append(
            f"Seed {args.seed} of equinox alone: {speed:.0f} steps/s; with all seeds: "
            f"{ratio:.2f} times that, and {'the same' if same else 'OTHER'} bits."
        )
    if {"flax", "equinox-flax-order"} <= results.keys():
        parts.append(verdict(args, results))
    if "flax" in results and {"equinox", "equinox-flax-order"} & results.keys():
        parts += ["Largest absolute differences:", parity_ladder(args, results)]
    return "\n\n".join(parts) + "\n"


HEADER = ("variant", "seed", "iteration", "step", *METRICS)


def to_csv(args, metrics):
    """Metrics (S, I) by variant, as text that reads back to the same bits."""
    lines = [",".join(HEADER)]
    for variant, columns in metrics.items():
        for seed, i in np.ndindex(columns["loss"].shape):
            row = [variant, args.seed + seed, i, (i + 1) * args.batch_size]
            # str writes the fewest digits that do; where no episode ended, nothing.
            row += [str(columns[name][seed, i]) for name in METRICS]
            row[4:6] = ("" if x == "nan" else x for x in row[4:6])
            lines.append(",".join(map(str, row)))
    return "\n".join(lines) + "\n"


def from_csv(text):
    """Metrics (S, I) by variant and steps per iteration; ValueError if not whole."""
    header, *rows = (line.split(",") for line in text.splitlines() or [""])
    variants = list(dict.fromkeys(row[0] for row in rows))
    if tuple(header) != HEADER or not set(variants) <= COLORS.keys():
        raise ValueError("it was not written by compare.py")
    seeds = list(dict.fromkeys(row[1] for row in rows if len(row) == len(HEADER)))
    iterations = range(len(rows) // max(1, len(variants) * len(seeds)))
    keys = [[v, s, str(i)] for v in variants for s in seeds for i in iterations]
    if not rows or not text.endswith("\n") or [row[:3] for row in rows] != keys:
        raise ValueError("it is empty or cut off")
    values = np.array([[float(x or "nan") for x in row[4:]] for row in rows])
    values = values.reshape(len(variants), len(seeds), len(iterations), -1)
    columns = (dict(zip(METRICS, np.moveaxis(x, -1, 0))) for x in values)
    return dict(zip(variants, columns)), int(rows[0][3])


def plot_returns(axes, metrics, steps_per_iteration):
    """Draw the mean return of each seed, and their mean with its standard error."""
    for variant, columns in metrics.items():
        num_iterations = columns["loss"].shape[1]
        size = math.ceil(num_iterations / 100)
        returns = np.ma.masked_invalid(mean_returns(columns, size))
        ends = np.minimum(size * np.arange(1, returns.shape[1] + 1), num_iterations)
        steps = steps_per_iteration * ends
        mean, error = returns.mean(axis=0), returns.std(axis=0) / len(returns) ** 0.5
        color, same = COLORS[variant], variant == "equinox-flax-order"
        if same:  # as Flax, on top of it
            axes.plot(steps, mean, ":", color=color, lw=2, label=variant, zorder=4)
            continue
        axes.plot(steps, returns.T, color=color, lw=0.7, alpha=0.4)
        axes.fill_between(steps, mean - error, mean + error, color=color, alpha=0.2)
        axes.plot(steps, mean, color=color, lw=2.5, label=variant, zorder=3)
    axes.set(xlabel="environment steps", ylabel="episode return")
    axes.set_title("each seed; mean, with its standard error")


def plot_distance(axes, metrics, variant):
    """Draw how far the metrics of a variant are from Flax's: all seeds, the median."""
    pairs = [(metrics[variant][x], metrics["flax"][x]) for x in LOSSES]
    distances = [abs(x - y) / (abs(y).mean() or 1) for x, y in pairs]
    distances = np.nan_to_num(np.max(distances, axis=0))
    color, label = COLORS[variant], variant
    if distances.any():
        decade = math.floor(math.log10(distances[distances > 0].min()))
        axes.set_yscale("symlog", linthresh=10.0**decade)
        axes.plot(distances.T, color=color, lw=0.7, alpha=0.4)
    else:
        label += ": identical"
    axes.plot(np.median(distances, axis=0), color=color, lw=2.5, label=label)
    axes.set(xlabel="iteration", ylabel="difference / mean of the metric")
    axes.set_title("largest difference of a metric from Flax")
    axes.legend(loc="center right")


def plot(args, metrics, steps_per_iteration):
    """PNG: the returns, and how far Equinox's metrics are from Flax's, if both ran."""
    compared = [x for x in ("equinox", "equinox-flax-order") if x in metrics]
    widths = (3, 2) if compared and "flax" in metrics else (1,)
    figure = Figure(figsize=(10, 4), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    plot_returns(axes[0], metrics, steps_per_iteration)
    if args.env_id == "CartPole-v1":
        axes[0].axhline(500, color="gray", ls="--", lw=1)
    figure.legend(loc="outside lower center", ncols=len(metrics))
    if len(axes) > 1:
        for variant in compared:
            plot_distance(axes[1], metrics, variant)
    content = io.BytesIO()
    figure.savefig(content)
    return content.getvalue()


def write(path, content):
    """Write bytes to a temporary file, then rename it: never half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def new_folder(args):
    """Make the output folder, with a returns.csv, or exit with one line."""
    folder = args.output_dir or Path("results", time.strftime("%Y-%m-%d-%H%M%S"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # "x": of two runs that want the same folder, one is refused.
        with open(folder / "returns.csv", "x") as file:
            file.write(to_csv(args, {}))
    except OSError as error:
        sys.exit(f"--output-dir: {error.strerror}: {error.filename}")
    return folder


def draw(args, folder):
    """Write the figure of what is in returns.csv, or exit with one line."""
    path = folder / "returns.csv"
    try:
        metrics, steps_per_iteration = from_csv(path.read_text())
        write(folder / "compare.png", plot(args, metrics, steps_per_iteration))
    except (OSError, ValueError) as error:
        sys.exit(f"{path}: {error}")


def main(args):
    """Run the variants and keep each that has ended; then draw and print."""
    if args.plot_only:
        return draw(args, args.output_dir)
    # Process 0 writes; the others help to compute.
    folder = new_folder(args) if jax.process_index() == 0 else None
    results, metrics = {}, {}
    try:
        for variant in args.variants:
            results[variant] = run(variant, args)
            metrics[variant] = results[variant]["metrics"]
            if folder:
                write(folder / "returns.csv", to_csv(args, metrics).encode())
    except KeyboardInterrupt:
        print("\ninterrupted: what has ended is kept", file=sys.stderr)
    if folder and results:
        text = summary(args, results)
        write(folder / "summary.md", text.encode())
        print(text)
        draw(args, folder)
        print(f"written to {folder}", file=sys.stderr)
    sys.exit(130 if len(results) < len(args.variants) else 0)


if __name__ == "__main__":
    main(tyro.cli(Args))
