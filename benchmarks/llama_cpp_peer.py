"""What llama.cpp makes of a GGUF file: runs in an environment of its own, asked by benchmarks/llama_cpp.py.

python llama_cpp_peer.py model.gguf < question.json > answer.json
"""

import json
import sys

from llama_cpp import Llama


def main() -> None:
    asked = json.load(sys.stdin)
    length = max(map(len, asked["windows"]))
    model = Llama(sys.argv[1], n_ctx=length, n_batch=length, logits_all=True, n_threads=1, verbose=False)
    found = []
    for ids in asked["windows"]:
        model.reset()
        model.eval(ids)
        found.append(model.scores[: len(ids)].argmax(1).tolist())
    ids = [model.tokenize(text.encode(), add_bos=True, special=True) for text in asked["texts"]]
    json.dump({"ids": ids, "next": found}, sys.stdout)


if __name__ == "__main__":
    main()
