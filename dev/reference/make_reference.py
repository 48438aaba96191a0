"""Writes data/reference/{tiny,odd,muon}.safetensors, the values with which test_gpt.cu compares train_gpt.cu.

The reference is computed in float64, so its rounding error is negligible, and stored in FP32. The files also contain
the errors of PyTorch itself in FP32, BF16 and FP16, which are the limits for train_gpt.cu's errors. README.md describes
the contents. Arguments select files by name: make_reference.py muon
"""
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import safetensors.numpy
import torch

from config import Config
from model import GPT

REFERENCE = Path(__file__).resolve().parents[2] / "data" / "reference"

# tiny has sizes that suit a GPU. odd does not: B*T and the vocabulary are not multiples of any tile size, T is neither
# a multiple of 16 nor the whole context, and the channels end within a warp. Sizes that are equal in tiny (heads and B,
# layers and micro-batches) differ in odd, which exposes an index computed from the wrong size. odd has a layer that is
# neither the first nor the last. Its parameters are FP16 numbers and stored as such, in half the space. muon is a small
# odd, trained with torch.optim.Muon.
CASES = {"tiny": dict(config=Config(layers=2, heads=4, channels=64, context=32, vocab=256), B=4, T=32,
                      parameter_dtype=torch.float32, seed=0),
         "odd": dict(config=Config(layers=3, heads=3, channels=48, context=20, vocab=101), B=5, T=19,
                     parameter_dtype=torch.float16, seed=10),
         "muon": dict(config=Config(layers=2, heads=3, channels=48, context=20, vocab=53), B=5, T=19,
                      parameter_dtype=torch.float16, seed=20, muon=True)}

STEPS, ACCUMULATION = 10, 2

# In FP16 the loss is scaled, so that the smallest gradients stay above 2^-14, below which FP16 is denormal, and the
# largest below 65504.
LOSS_SCALE = {torch.float16: 1024}

# The learning rate is larger than in a real run, because weights close to 1 must change much more than their rounding
# error. eps is larger too: Adam divides a gradient by its own magnitude. Where the gradient is only rounding error (the
# keys' bias, whose exact gradient is zero), Adam would turn this error into a full step, which cannot be compared.
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, GRAD_CLIP = 1e-2, 0.9, 0.95, 3e-4, 0.1, 1.75

# In these steps only the first tokens of the vocabulary occur. This makes the gradient larger, so that some steps are
# clipped and some are not.
NARROW_STEPS, NARROW_VOCAB = (2, 3, 7), 8

# A single rounding error may be small by chance. So the errors are measured on this many variants of the model, each
# with its own reference, and the maximum is recorded.
DRAWS = 8


def draw_parameters(config, seed):
    """Returns weights and biases far from 0, LayerNorm weights around 1 but not 1: each affects the loss."""
    random = np.random.RandomState(seed)  # gives the same numbers in every version of NumPy
    parameters = {}
    for name, shape in config.shapes().items():
        layernorm_weight = name.endswith(("ln_1.weight", "ln_2.weight", "ln_f.weight"))
        value = (1 if layernorm_weight else 0) + 0.1 * random.standard_normal(shape)
        parameters[name] = torch.from_numpy(value.astype(np.float32))
    return parameters


def perturb(parameters, draw):
    """Returns variant `draw` of the model. Variant 0 is the model itself. In the others each weight changes by about
    one BF16 rounding step: nearly the same function, but with different rounding errors."""
    random = np.random.RandomState(1000 + draw)
    scale = 0 if draw == 0 else 2**-8
    return {name: value * torch.from_numpy((1 + scale * random.standard_normal(value.shape)).astype(np.float32))
            for name, value in parameters.items()}


def draw_tokens(vocab, B, T, seed):
    tokens = np.random.RandomState(seed).randint(vocab, size=(STEPS, ACCUMULATION, B, T + 1))
    tokens[list(NARROW_STEPS)] %= NARROW_VOCAB
    return torch.from_numpy(tokens.astype(np.int64))


def differentiate(config, parameters, tokens, dtype):
    """Returns logits, loss and gradients of one micro-batch. Weights, activations and gradients have this dtype. The
    returned gradients are unscaled and therefore at least FP32."""
    model = GPT(config).to(dtype)
    model.load_state_dict(parameters)  # rounds to dtype
    logits, loss = model(tokens[:, :-1], tokens[:, 1:])
    scale = LOSS_SCALE.get(dtype, 1)
    (loss * scale).backward()
    wide = torch.promote_types(dtype, torch.float32)
    return logits.detach(), loss.detach(), {name: p.grad.to(wide) / scale for name, p in model.named_parameters()}


def block_matrices(master):
    """Returns pairs of matrices that Muon updates, as views of the weights, and functions that return their gradients:
    those of a block, of which Q, K and V are separate."""
    matrices = []
    for name, parameter in master.items():
        if name.startswith("h.") and parameter.dim() == 2:
            parts = 3 if name.endswith("c_attn.weight") else 1
            matrices += [(torch.nn.Parameter(view), lambda p=parameter, i=i, parts=parts: p.grad.chunk(parts, dim=1)[i])
                         for i, view in enumerate(parameter.data.chunk(parts, dim=1))]
    return matrices


def muon_step(optimizer, matrices, dtype):
    """One step of torch.optim.Muon, whose iterations are in BF16, in `dtype`."""
    for view, gradient in matrices:
        view.grad = gradient()
    # PyTorch calls x.bfloat16() up to version 2.9 and x.to(torch.bfloat16) in 2.15.
    with mock.patch.object(torch.Tensor, "bfloat16", lambda x: x.to(dtype)), \
            mock.patch.object(torch, "bfloat16", dtype):
        optimizer.step()


def train(config, initial, tokens, dtype, muon):
    """Returns loss and gradient norm before each update, and the parameters after the last one.

    With BF16 and FP16 this is mixed precision: only forward, backward and Muon's iterations use dtype; master weights,
    gradient accumulation, clipping and AdamW are FP32.
    """
    master_dtype = torch.promote_types(dtype, torch.float32)
    master = {name: torch.nn.Parameter(value.to(master_dtype, copy=True)) for name, value in initial.items()}
    matrices = block_matrices(master) if muon else []
    of_adamw = [p for name, p in master.items() if not (muon and name.startswith("h.") and p.dim() == 2)]
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in of_adamw if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
         {"params": [p for p in of_adamw if p.dim() < 2], "weight_decay": 0.0}],
        lr=LR, betas=(BETA1, BETA2), eps=EPS)
    if muon:
        of_matrices = torch.optim.Muon([view for view, _ in matrices], lr=LR, weight_decay=WEIGHT_DECAY,
                                       adjust_lr_fn="match_rms_adamw")
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
        if muon:
            muon_step(of_matrices, matrices, dtype)
    return torch.stack(losses), torch.stack(norms), {name: p.detach() for name, p in master.items()}


def run(config, parameters, tokens, dtype, muon):
    """Returns {key in the file: tensor} of all tensors that are compared."""
    logits, loss, gradients = differentiate(config, parameters, tokens[0, 0], dtype)
    losses, norms, final = train(config, parameters, tokens, dtype, muon)
    return {"logits": logits, "loss": loss.reshape(1), "step_loss": losses, "step_norm": norms,
            **{f"grad/{name}": value for name, value in gradients.items()},
            **{f"final/{name}": value for name, value in final.items()}}


def errors(found, reference, parameters):
    """Returns ||found - reference|| / ||reference|| for each key. For final/ it is relative to the change made by
    training: relative to the weights, even no training at all would be a small error."""
    result = {}
    for key, true in reference.items():
        size = true - parameters[key[len("final/"):]] if key.startswith("final/") else true
        result[key] = ((found[key].double() - true).norm() / size.norm()).item()
    return result


def check(reference, fp32_error, bf16_error, fp16_error):
    """Raises AssertionError if a gradient vanishes or an error is implausible: such a reference would test nothing."""
    for key, value in reference.items():
        if key.startswith("grad/"):
            assert value.norm() > 1e-3, f"{key}: norm {value.norm():.2e}, expected more than 1e-3"
    norms = reference["step_norm"].tolist()
    assert min(norms) < GRAD_CLIP < max(norms), f"norms {norms}: expected some above and some below {GRAD_CLIP}"
    for step, norm in enumerate(norms):
        assert abs(norm / GRAD_CLIP - 1) > 0.05, f"step {step}: norm {norm:.3f} is too close to {GRAD_CLIP}"
    for key, error in fp32_error.items():
        assert error < 1e-5, f"{key}: FP32 error {error:.2e}, expected less than 1e-5"
    for key, error in bf16_error.items():
        # Rounding errors partly cancel in means over many tokens.
        minimum = 1e-5 if key in ("loss", "step_loss", "step_norm") else 1e-3
        assert minimum < error < 0.2, f"{key}: BF16 error {error:.2e}, expected {minimum:g} to 0.2"
        # FP16 has three more significant bits than BF16.
        minimum, error = minimum / 16, fp16_error[key]
        assert minimum < error < 0.2 / 4, f"{key}: FP16 error {error:.2e}, expected {minimum:g} to 0.05"


def serialize(tensors, metadata):
    """Returns the bytes of a safetensors file with sorted metadata: the package's order differs from run to run."""
    data = safetensors.numpy.save(tensors, metadata)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(metadata.items()))
    return data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(end - 8) + data[end:]


def make(name, config, B, T, parameter_dtype, seed, muon=False):
    drawn = {key: value.to(parameter_dtype) for key, value in draw_parameters(config, seed).items()}
    parameters = {key: value.float() for key, value in drawn.items()}
    tokens = draw_tokens(config.vocab, B, T, seed + 1)
    reference = run(config, parameters, tokens, torch.float64, muon)
    worst = {torch.float32: {}, torch.bfloat16: {}, torch.float16: {}}
    for draw in range(DRAWS):
        variant = perturb(parameters, draw)
        variant_reference = run(config, variant, tokens, torch.float64, muon)
        for dtype, maxima in worst.items():
            found = errors(run(config, variant, tokens, dtype, muon), variant_reference, variant)
            maxima.update({key: max(error, maxima.get(key, 0)) for key, error in found.items()})
    worst = dict(zip(("fp32_error", "bf16_error", "fp16_error"), worst.values()))
    check(reference, *worst.values())

    tensors = {"tokens": tokens.int(), **{key: value.float() for key, value in reference.items()},
               **{f"param/{key}": value for key, value in drawn.items()},
               **{f"{which}/{key}": torch.tensor([error]) for which, found in worst.items()
                  for key, error in found.items()}}
    metadata = dict(layers=config.layers, heads=config.heads, channels=config.channels,
                    context=config.context, vocab=config.vocab, B=B, T=T, steps=STEPS,
                    accumulation=ACCUMULATION, lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS,
                    weight_decay=WEIGHT_DECAY, grad_clip=GRAD_CLIP, fp16_loss_scale=LOSS_SCALE[torch.float16],
                    torch=torch.__version__, **({"optimizer": "muon"} if muon else {}))
    path = REFERENCE / f"{name}.safetensors"
    path.write_bytes(serialize({key: value.numpy() for key, value in tensors.items()},
                               {key: str(value) for key, value in metadata.items()}))

    print(f"{path}: {path.stat().st_size} bytes, PyTorch {torch.__version__}")
    for which, found in worst.items():
        print(f"  {which}: {min(found.values()):.1e} to {max(found.values()):.1e}")


def main():
    torch.set_num_threads(1)  # with more threads, the order of sums varies
    for name, case in CASES.items():
        if name in (sys.argv[1:] or CASES):
            make(name, **case)


if __name__ == "__main__":
    main()
