"""What vLLM generates greedily from a folder: python -m tests.models.vllm_greedy FOLDER TOKENS, prompts as JSON on stdin.

The CPU kernels of vLLM 0.32 for Gated DeltaNet compute in bfloat16, with heads of 64 or 128 channels.
"""

import json
import os
import sys


def main() -> None:
    """Print the tokens of each prompt, and their log-probabilities, as one line of JSON."""
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    from vllm import LLM, SamplingParams, TokensPrompt

    folder, tokens = sys.argv[1], int(sys.argv[2])
    model = LLM(
        folder,
        dtype="bfloat16",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in json.load(sys.stdin)]
    outputs = [each.outputs[0] for each in model.generate(prompts, sampling, use_tqdm=False)]
    responses = [
        (
            list(output.token_ids),
            [step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)],
        )
        for output in outputs
    ]
    print(f"\n{json.dumps(responses)}")


if __name__ == "__main__":
    main()
