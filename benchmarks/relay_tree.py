"""When would engines that pass weights on to other engines be faster than all of them reading from trainers?

    python -m benchmarks.relay_tree [--gigabytes 65.6] [--gbit 400] [--bucket-mib 32]

A simulation, not a measurement. Each GPU has a link of its own that sends and receives at full speed at the
same time; a message occupies the sender and the receiver for its length over the bandwidth, and arrives after
a latency. All engine workers of one tensor rank are simulated: the others do the same on other links. Direct:
worker e reads from replica e % DP, and engines begin at different layers, so that all pipeline stages send at
once; "in layer order", all begin at the first. Tree: each replica is the root of a tree of its share of the
engines; a node sends each message to its children as soon as it has it. Switches, checksums and copies cost
nothing, so real times are longer.
"""

from __future__ import annotations

import argparse

CASES = ((64, 8), (256, 8), (512, 8), (2560, 8), (2560, 80))
"""Engines, data-parallel replicas of the trainer."""


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=65.6, help="weights of the model, in 1e9 bytes")
    parser.add_argument("--workers", type=int, default=8, help="tensor parallel size of engines")
    parser.add_argument("--shards", type=int, default=64, help="ranks that hold the model: TP x PP")
    parser.add_argument("--gbit", type=float, default=400.0, help="bandwidth of a GPU's link")
    parser.add_argument("--latency", type=float, default=20e-6, help="seconds")
    parser.add_argument("--bucket-mib", type=int, default=32, help="bytes of a message")
    a = parser.parse_args()
    bandwidth = a.gbit * 1e9 / 8
    share = a.gigabytes * 1e9 / a.workers
    messages = max(1, round(share / (a.bucket_mib << 20)))
    seconds = share / messages / bandwidth
    sources = max(1, a.shards // a.workers)  # ranks of one replica that hold what one worker reads
    print(
        f"{a.gigabytes} GB, engines of {a.workers} workers, {a.shards} ranks a replica, {a.gbit:.0f} Gbit/s"
    )
    print("| engines | DP | way | seconds | GB from the busiest rank | from the busiest engine worker |")
    print("| ---: | ---: | --- | ---: | ---: | ---: |")
    for engines, replicas in CASES:
        tree = -(-engines // replicas)  # engines that read from one replica
        ways = {"direct, in layer order": (tree, False), "direct": (tree, True)}
        ways |= {f"tree of {arity}": (arity, True) for arity in (8, 4, 2, 1)}
        for way, (arity, spread) in ways.items():
            time, sent = simulate(tree, arity, messages, sources, seconds, a.latency, spread)
            size = share / messages / 1e9
            print(
                f"| {engines} | {replicas} | {way} | {time:.2f} | "
                f"{size * max(sent[:sources]):.1f} | {size * max(sent[sources:]):.1f} |"
            )


def simulate(
    engines: int, arity: int, messages: int, sources: int, seconds: float, latency: float, spread: bool
) -> tuple[float, list[int]]:
    """One replica and its engines; returns the time of the last arrival and the messages that each link sent.

    Node 0 is the replica, whose ranks hold the messages in turn; node i > 0 is an engine, and the children of
    node i are arity * i + 1, .... seconds: time of a message on a link. spread: engines begin at different
    layers.
    """
    arrived = [0.0] * (engines + 1)
    sending = [0.0] * (sources + engines)
    receiving = [0.0] * (engines + 1)
    sent = [0] * (sources + engines)
    last = 0.0
    for message in range(messages):
        arrived[0] = 0.0
        for node in range(1, engines + 1):
            parent = (node - 1) // arity
            stage = (message + node) % sources if spread else message * sources // messages
            link = sources + parent - 1 if parent else stage
            begin = max(arrived[parent], sending[link], receiving[node])
            sending[link] = receiving[node] = begin + seconds
            arrived[node] = begin + seconds + latency
            sent[link] += 1
            last = max(last, arrived[node])
    return last, sent


if __name__ == "__main__":
    main()
