"""vLLM's side of ``benchmarks.engine --rival``: run by an interpreter that has vLLM's CPU build, knows nothing of us.

Standard input and output are those of ``llama.py``; ``weights`` is a directory in the layout of transformers. What a prompt takes up to
its first token is measured by asking for one token before all of them.
"""

import json
import os
import sys
import time


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(asked["threads"]))
    from vllm import LLM, SamplingParams, TokensPrompt

    model = LLM(
        asked["weights"],
        dtype=asked["dtype"],
        max_model_len=max(map(len, asked["prompts"])) + asked["tokens"] + 8,
        max_num_seqs=1,
        enable_prefix_caching=False,
    )

    def run(prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, stop_token_ids=asked["eos"])
        began = time.perf_counter()
        (answer,) = model.generate([TokensPrompt(prompt_token_ids=prompt)], sampling, use_tqdm=False)
        return time.perf_counter() - began, list(answer.outputs[0].token_ids)

    found: dict[str, list] = {"seconds": [], "first": [], "outputs": []}
    for prompt in [asked["prompts"][0][:20], *asked["prompts"]]:
        first_s, _ = run(prompt, 1)
        seconds, output = run(prompt, asked["tokens"])
        found["seconds"].append(seconds)
        found["first"].append(first_s)
        found["outputs"].append(output)
    print(json.dumps({name: values[1:] for name, values in found.items()}))  # the first was to warm up


if __name__ == "__main__":
    main()
