"""Does `paceline plan` foretell what the system does? Simulated devices, real tiers, real link.

    python -m benchmarks.plan [--quick]

What a plan cannot know of a machine (round trip, what a step takes beside its forward) is measured in a plain run and at k = 2;
then the plan foretells the speed over plain decoding at other k, from the acceptance that the drafter was told to have, and from
the one that it really had in those rounds (a few hundred rounds stray by some per cent). The last line is ``RESULT {json}``.
"""

import argparse
import asyncio
import json
import statistics
import time

from benchmarks.link import decode, tiers
from gates.plan import Scenario, plan
from paceline.config import SimulationConfig
from paceline.simulation import pair_of
from paceline.types import Plan, RoundRecord

WORLDS = (("8b+1b", 0.8), ("70b+1b", 0.6), ("27b+block", 0.7))
CALIBRATED_AT = 2
BAR = 0.03


def measured_acceptance(rounds: list[RoundRecord]) -> float:
    """Accepted over tested draft tokens."""
    tested = sum(min(one.accepted + 1, one.drafted) for one in rounds)
    return sum(one.accepted for one in rounds) / tested


async def world(pair: str, agreement: float, ks: tuple[int, ...], tokens: int) -> dict[str, object]:
    settings = [f'simulation.pair="{pair}"', f"simulation.agreement={agreement}", 'verify.draft_level="0"']
    found: dict[int, list[RoundRecord]] = {}
    async with tiers(settings) as (stub,):
        for k in (0, CALIBRATED_AT, *ks):
            one = Plan.plain("benchmark") if not k else Plan.speculative("simulated", k, "b", k_fixed=True)
            rounds = await decode(stub, 7, tokens if k else tokens // 4, plan=one)
            found[k] = [record for record in rounds[2:-2] if record.drafted == k]
    costs = pair_of(SimulationConfig(pair=pair))
    step_s = statistics.median(one.total_s for one in found[0])
    rtt_s = statistics.median(one.network_s for one in found[CALIBRATED_AT])
    # Everything of a round that is neither forward nor way: the same at every k.
    draft_over_s = statistics.median(one.draft_s for one in found[CALIBRATED_AT]) - costs.draft_seconds(
        CALIBRATED_AT
    )
    result: dict[str, object] = {"step_ms": round(1e3 * step_s, 2), "rtt_ms": round(1e3 * rtt_s, 2)}
    for k in ks:
        rounds = found[k]
        speed = sum(r.committed for r in rounds) / sum(r.total_s for r in rounds) * step_s
        foretold = {}
        for name, acceptance in (("set", agreement), ("measured", measured_acceptance(rounds))):
            scenario = Scenario(
                (acceptance,), costs.verify, costs.draft, costs.one_pass, rtt_s + draft_over_s,
                step_s - costs.verify.seconds(1), max_k=k,
            )  # fmt: skip
            foretold[name] = plan(scenario).depths[k].speed
        off = speed / foretold["measured"] - 1
        result[f"k={k}"] = {
            "rounds": len(rounds),
            "speed": round(speed, 3),
            "foretold": round(foretold["measured"], 3),
            "off": round(off, 4),
            "foretold_from_the_set_acceptance": round(foretold["set"], 3),
            "off_from_the_set_acceptance": round(speed / foretold["set"] - 1, 4),
        }
        print(pair, f"k={k}", result[f"k={k}"], flush=True)
    return result


async def measure(*, quick: bool) -> dict[str, object]:
    ks = (4,) if quick else (1, 4, 6)
    tokens = 400 if quick else 1600
    found = {pair: await world(pair, agreement, ks, tokens) for pair, agreement in WORLDS}
    worst = max(abs(found[pair][f"k={k}"]["off"]) for pair, _ in WORLDS for k in ks)  # type: ignore[index]
    return {"worlds": found, "worst_off": worst, "bars": {f"within {BAR:.0%}": worst <= BAR}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="k = 4, fewer rounds: about a minute")
    arguments = parser.parse_args()
    started = time.monotonic()
    result = asyncio.run(measure(quick=arguments.quick))
    result["seconds"] = round(time.monotonic() - started, 1)
    print("RESULT", json.dumps(result))


if __name__ == "__main__":
    main()
