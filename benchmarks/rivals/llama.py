"""llama.cpp's side of ``benchmarks.engine --rival``: run by an interpreter that has llama-cpp-python, knows nothing of us.

Standard input is one JSON line {weights, threads, tokens, eos, prompts: [[id, ...], ...]}; standard output ends in one line
{seconds: [...], first: [...], outputs: [[id, ...], ...]}: the whole time of each prompt and the part up to its first token.
"""

import json
import sys
import time

import llama_cpp


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    longest = max(map(len, asked["prompts"])) + asked["tokens"] + 8
    model = llama_cpp.Llama(
        asked["weights"],
        n_ctx=longest,
        n_threads=asked["threads"],
        n_threads_batch=asked["threads"],
        verbose=False,
    )
    answer: dict[str, list] = {"seconds": [], "first": [], "outputs": []}
    for prompt in [asked["prompts"][0][:20], *asked["prompts"]]:
        model.reset()
        model._ctx.kv_cache_clear() if hasattr(model._ctx, "kv_cache_clear") else None
        output: list[int] = []
        began, first = time.perf_counter(), 0.0
        for token in model.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0):
            first = first or time.perf_counter() - began
            output.append(token)
            if len(output) == asked["tokens"] or token in asked["eos"]:
                break
        answer["seconds"].append(time.perf_counter() - began)
        answer["first"].append(first)
        answer["outputs"].append(output)
    print(json.dumps({name: values[1:] for name, values in answer.items()}))  # the first was to warm up


if __name__ == "__main__":
    main()
