"""Draws tokens with transformers on the CPU; sampling.py runs it.

    torch_generate.py FOLDER write               GPT-2 124M with random weights
    torch_generate.py FOLDER fp32|bf16 SETTINGS  for each N that it reads, draws N tokens and answers with the seconds

SETTINGS is JSON: temperature, top_k, and end_of_text, the token that it begins with.
"""
import json
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

folder, what = sys.argv[1:3]
if what == "write":
    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config()).save_pretrained(folder)
    sys.exit()

settings = json.loads(sys.argv[3])
begin = settings.pop("end_of_text")
model = GPT2LMHeadModel.from_pretrained(folder)
model = model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[what]).eval()
print("loaded", flush=True)
for line in sys.stdin:
    tokens = int(line)
    start = time.perf_counter()
    with torch.no_grad():
        model.generate(torch.tensor([[begin]]), attention_mask=torch.ones(1, 1, dtype=torch.long), do_sample=True,
                       min_new_tokens=tokens, max_new_tokens=tokens, pad_token_id=begin, **settings)
    print(time.perf_counter() - start, flush=True)
