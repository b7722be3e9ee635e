"""What a verify replica recorded of a request (``verify.records``, docs/replay.md), in the shape of ``generate --json``."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

ALL_TASKS = "all tasks"
"""Replicas do not know the type of task."""
_ENDED = {"stop", "length"}


def as_record(served: Mapping[str, Any], numerics: str) -> dict[str, Any] | None:
    """The request; None for one that did not come to its end, or was resumed from elsewhere."""
    if served["finish"] not in _ENDED or served["resumed_tokens"]:
        return None
    plan, spent, rounds = dict(served["plan"]), served["timings"], served["rounds"]
    speculative = plan["mode"] == "speculative"
    if not speculative:
        plan |= {"drafter": "", "law": None}
    first_s = spent["queue_s"] + spent["prefill_s"]
    outcomes = Counter(one["outcome"] for one in rounds)
    drafted = [one for one in rounds if one["drafted"]]
    return {
        "request_id": served["request_id"],
        "task_type": ALL_TASKS,
        "temperature": served["sampling"]["temperature"],
        "at": served["began_unix"],
        "key": _key(served),
        "token_ids": served.get("output_ids") or (),
        "numerics": numerics,
        "plan": plan,
        "usage": {"prompt_tokens": served["prompt_tokens"], "completion_tokens": served["output_tokens"]},
        "timings": dict(spent) | {"time_to_first_token_s": first_s, "total_s": first_s + spent["decode_s"]},
        "speculative": {
            "num_rounds": len(rounds),
            "num_spec_steps": len(drafted),
            "num_draft_tokens": sum(one["drafted"] for one in drafted),
            "num_accepted_draft_tokens": sum(one["accepted"] for one in drafted),
            "num_ignored_draft_tokens": sum(one["ignored"] for one in drafted),
            "num_late_rounds": outcomes["late"],
            "num_empty_rounds": outcomes["empty"],
            "num_unavailable_rounds": outcomes["unavailable"],
            "acceptance_histogram": (),
        },
        "rounds": rounds,
    }


def _key(served: Mapping[str, Any]) -> str:
    """The same for requests that must give the same tokens; empty where the prompt was not recorded."""
    if not served.get("prompt_ids"):
        return ""
    what = [served["prompt_ids"], served["sampling"], served["max_tokens"]]
    return hashlib.blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=12).hexdigest()
