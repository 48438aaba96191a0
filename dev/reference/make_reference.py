"""Writes the values that test_gpt.cu compares train_gpt.cu with: data/reference/{tiny,odd}.safetensors.

The truth is computed in float64, so that it has no rounding error worth mentioning, and stored in
FP32. Beside it stands how far PyTorch itself is from that truth when it computes in FP32, in BF16
and in FP16: that is the measure for train_gpt.cu's own error. README.md lists what the files hold.
"""
import json
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from config import Config
from model import GPT

REFERENCE = Path(__file__).resolve().parents[2] / "data" / "reference"

# tiny has sizes that suit a GPU. odd has not: B*T and the vocabulary are multiples of no tile, T is neither a multiple
# of 16 nor the whole context, and the channels end within a warp. Sizes that are equal in tiny (heads and B, layers and
# micro-batches) differ in odd, so that an index computed from the wrong one shows. Of odd's three layers one is neither
# the first nor the last. Its parameters are FP16 numbers, in the file too, where they take half the space.
CASES = {"tiny": dict(config=Config(layers=2, heads=4, channels=64, context=32, vocab=256), B=4, T=32,
                      parameter_dtype=torch.float32),
         "odd": dict(config=Config(layers=3, heads=3, channels=48, context=20, vocab=101), B=5, T=19,
                     parameter_dtype=torch.float16)}

STEPS, ACCUMULATION = 10, 2

# In FP16 the loss is scaled: the smallest gradients stay above 2^-14, where FP16 loses digits, and the largest below
# 65504.
LOSS_SCALE = {torch.float16: 1024}

# The learning rate is larger than in a real run, because weights close to 1 must move much further than their rounding.
# So is eps: Adam divides a gradient by its own size, so where the gradient is only rounding error (the bias of the
# keys, whose true gradient is zero), it turns that error into a full step, and nothing could be compared.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, GRAD_CLIP = 1e-2, 0.9, 0.95, 3e-4, 0.1, 1.75

# In these steps only the first tokens of the vocabulary occur. That makes the gradient larger, so
# that some steps are clipped and some are not.
NARROW_STEPS, NARROW_VOCAB = (2, 3, 7), 8

# One rounding error says little about its size. So the errors are measured on this many variants of the model, each
# with its own truth, and the largest is recorded.
DRAWS = 8


def draw_parameters(config, seed):
    """Weights and biases far from 0, LayerNorm weights around 1 but not 1: everything matters."""
    random = np.random.RandomState(seed)  # its numbers stay the same in every version of NumPy
    parameters = {}
    for name, shape in config.shapes().items():
        layernorm_weight = name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
        value = (1 if layernorm_weight else 0) + 0.1 * random.standard_normal(shape)
        parameters[name] = torch.from_numpy(value.astype(np.float32))
    return parameters


def perturb(parameters, draw):
    """Draw 0 is the model itself. In the others each weight is off by about a BF16 rounding step:
    nearly the same function, but every rounding on the way falls anew."""
    random = np.random.RandomState(1000 + draw)
    scale = 0 if draw == 0 else 2**-8
    return {name: value * torch.from_numpy((1 + scale * random.standard_normal(value.shape)).astype(np.float32))
            for name, value in parameters.items()}


def draw_tokens(vocab, B, T, seed):
    tokens = np.random.RandomState(seed).randint(vocab, size=(STEPS, ACCUMULATION, B, T + 1))
    tokens[list(NARROW_STEPS)] %= NARROW_VOCAB
    return torch.from_numpy(tokens.astype(np.int64))


def differentiate(config, parameters, tokens, dtype):
    """Logits, loss and gradients of one micro-batch. Weights, activations and gradients are dtype;
    the gradients that are returned are no longer scaled, and so FP32 at least."""
    model = GPT(config).to(dtype)
    model.load_state_dict(parameters)  # rounds to dtype
    logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    scale = LOSS_SCALE.get(dtype, 1)
    (loss * scale).backward()
    wide = torch.promote_types(dtype, torch.float32)
    return logits.detach(), loss.detach(), {name: p.grad.to(wide) / scale for name, p in model.named_parameters()}


def train(config, initial, tokens, dtype):
    """Losses and gradient norms before each step, and the parameters after the last one.

    Below FP32 this is mixed precision: master weights, the accumulated gradient, the clipping and
    AdamW are FP32, only the forward and backward pass are dtype.
    """
    master_dtype = torch.promote_types(dtype, torch.float32)
    master = {name: torch.nn.Parameter(value.to(master_dtype, copy=True)) for name, value in initial.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in master.values() if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
         {"params": [p for p in master.values() if p.dim() < 2], "weight_decay": 0.0}],
        lr=LR, betas=(BETA1, BETA2), eps=EPS)
    losses, norms = [], []
    for micro_batches in tokens:
        for parameter in master.values():
            parameter.grad = torch.zeros_like(parameter)
        step_loss = 0
        for micro_batch in micro_batches:
            _, loss, gradients = differentiate(config, master, micro_batch, dtype)
            step_loss += loss / ACCUMULATION
            for name, parameter in master.items():
                parameter.grad += gradients[name] / ACCUMULATION
        losses.append(step_loss)
        norms.append(torch.nn.utils.clip_grad_norm_(list(master.values()), GRAD_CLIP))
        optimizer.step()
    return torch.stack(losses), torch.stack(norms), {name: p.detach() for name, p in master.items()}


def run(config, parameters, tokens, dtype):
    """Everything that is compared, by its key in the file."""
    logits, loss, gradients = differentiate(config, parameters, tokens[0, 0], dtype)
    losses, norms, final = train(config, parameters, tokens, dtype)
    return {"logits": logits, "loss": loss.reshape(1), "step_loss": losses, "step_norm": norms,
            **{f"grad/{name}": value for name, value in gradients.items()},
            **{f"final/{name}": value for name, value in final.items()}}


def errors(found, truth, parameters):
    """||found - truth|| / ||truth|| for each key. For final/ the truth is the change that training
    made: compared with a whole weight, even no training at all would look like a small error."""
    result = {}
    for key, true in truth.items():
        size = true - parameters[key[len("final/"):]] if key.startswith("final/") else true
        result[key] = ((found[key].double() - true).norm() / size.norm()).item()
    return result


def check(truth, fp32_error, bf16_error, fp16_error):
    """A reference in which something vanishes would test nothing: refuse to write it."""
    for key, value in truth.items():
        if key.startswith("grad/"):
            assert value.norm() > 1e-3, f"{key}: norm {value.norm():.2e}, expected more than 1e-3"
    norms = truth["step_norm"].tolist()
    assert min(norms) < GRAD_CLIP < max(norms), f"norms {norms}: expected some above and some below {GRAD_CLIP}"
    for step, norm in enumerate(norms):
        assert abs(norm / GRAD_CLIP - 1) > 0.05, f"step {step}: norm {norm:.3f} is too close to {GRAD_CLIP} to tell"
    for key, error in fp32_error.items():
        assert error < 1e-5, f"{key}: FP32 error {error:.2e}, expected less than 1e-5"
    for key, error in bf16_error.items():
        # Means over many tokens come out better than the tensors they are made of.
        least = 1e-5 if key in ("loss", "step_loss", "step_norm") else 1e-3
        assert least < error < 0.2, f"{key}: BF16 error {error:.2e}, expected {least:g} to 0.2"
        # FP16 has three digits more.
        least, error = least / 16, fp16_error[key]
        assert least < error < 0.2 / 4, f"{key}: FP16 error {error:.2e}, expected {least:g} to 0.05"


def serialize(tensors, metadata):
    """A safetensors file whose bytes depend on its contents only: the package writes the metadata
    in an order that changes from run to run, here it is sorted."""
    data = safetensors.numpy.save(tensors, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    return data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(end - 8) + data[end:]


def make(name, config, B, T, parameter_dtype, seed):
    drawn = {key: value.to(parameter_dtype) for key, value in draw_parameters(config, seed).items()}
    parameters = {key: value.float() for key, value in drawn.items()}
    tokens = draw_tokens(config.vocab, B, T, seed + 1)
    truth = run(config, parameters, tokens, torch.float64)
    worst = {torch.float32: {}, torch.bfloat16: {}, torch.float16: {}}
    for draw in range(DRAWS):
        variant = perturb(parameters, draw)
        variant_truth = run(config, variant, tokens, torch.float64)
        for dtype, largest in worst.items():
            found = errors(run(config, variant, tokens, dtype), variant_truth, variant)
            largest.update({key: max(error, largest.get(key, 0)) for key, error in found.items()})
    worst = dict(zip(("fp32_error", "bf16_error", "fp16_error"), worst.values()))
    check(truth, *worst.values())

    tensors = {"tokens": tokens.int(), **{key: value.float() for key, value in truth.items()},
               **{f"param/{key}": value for key, value in drawn.items()},
               **{f"{which}/{key}": torch.tensor([error]) for which, found in worst.items()
                  for key, error in found.items()}}
    metadata = dict(layers=config.layers, heads=config.heads, channels=config.channels,
                    context=config.context, vocab=config.vocab, B=B, T=T, steps=STEPS,
                    accumulation=ACCUMULATION, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS,
                    weight_decay=WEIGHT_DECAY, grad_clip=GRAD_CLIP, fp16_loss_scale=LOSS_SCALE[torch.float16],
                    torch=torch.__version__)
    path = REFERENCE / f"{name}.safetensors"
    path.write_bytes(serialize({key: value.numpy() for key, value in tensors.items()},
                               {key: str(value) for key, value in metadata.items()}))

    print(f"{path}: {path.stat().st_size} bytes, PyTorch {torch.__version__}")
    for which, found in worst.items():
        print(f"  {which}: {min(found.values()):.1e} to {max(found.values()):.1e}")


def main():
    torch.set_num_threads(1)  # more would add up in another order each time
    for seed, (name, case) in enumerate(CASES.items()):
        make(name, **case, seed=10 * seed)


if __name__ == "__main__":
    main()
