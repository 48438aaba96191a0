#include "options.h"

#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <type_traits>

constexpr size_t NONE = std::string::npos;

static std::string joined(const std::vector<std::string>& words, const char* gap = ", ", const char* last = ", ") {
    std::string text;
    for (size_t i = 0; i < words.size(); i++)
        text += (i == 0 ? "" : i + 1 < words.size() ? gap : last) + words[i];
    return text;
}

static Flag text(const char* name, int subcommands, const char* placeholder, std::string& to, const char* example,
                 const char* text) {
    auto parse = [&to](const std::string& s) { return !(to = s).empty(); };
    return {name, subcommands, placeholder, placeholder, example, text, parse, [&to] { return json(to); }};
}

// Valid values; by default at least 0. Doubles end at FP32's maximum, because the device uses them in FP32.
template <typename T> struct Range {
    T least = 0, most = std::numeric_limits<std::conditional_t<std::is_integral_v<T>, T, float>>::max();
};

template <typename T>
static Flag number(const char* name, int subcommands, const char* placeholder, T& to,
                   std::common_type_t<Range<T>> range, const char* example, const char* text) {
    std::string values = std::is_integral_v<T> ? "a whole number" : "a number";
    values += format(range.most < Range<T>().most ? " from %.13g to %.13g" : ", at least %.13g", double(range.least),
                     double(range.most));
    auto parse = [&to, range](const std::string& s) {
        T value;
        if (!parse_number(s, value) || value < range.least || value > range.most) return false;
        to = value;
        return true;
    };
    // A default below the range: the value depends on other options.
    auto value = [&to, range] { return to < range.least ? json() : json(to); };
    return {name, subcommands, placeholder, values, example, text, parse, value};
}

// Returns `flag`, which then also accepts `word`, for which it sets `to` to `meaning`. A switch needs no word.
template <typename T> static Flag or_word(const char* word, T& to, T meaning, Flag flag) {
    flag.placeholder = flag.is_switch ? format("[%s]", word) : format("%s|%s", word, flag.placeholder.c_str());
    flag.values = format("%s or %s", word, flag.is_switch ? "nothing" : flag.values.c_str());
    flag.parse = [=, &to](const std::string& s) { return s == word ? (to = meaning, true) : flag.parse(s); };
    flag.value = [=, &to] { return to == meaning ? json(word) : flag.value(); };
    return flag;
}

// Returns a flag for a size in bytes. `to` is 0 if the flag is not given.
static Flag size(const char* name, int subcommands, double& to, const char* example, const char* text) {
    auto parse = [&to](const std::string& s) {
        for (const auto& [unit, factor] : {std::pair{"GiB", 0x1p30}, {"MiB", 0x1p20}, {"GB", 1e9}, {"MB", 1e6}}) {
            double number;
            if (!ends_with(s, unit) || !parse_number(s.substr(0, s.size() - strlen(unit)), number)) continue;
            to = number * factor;
            return number > 0 && to < 0x1p56;
        }
        return false;
    };
    auto value = [&to] { return to ? json(to) : json(); };
    return {name, subcommands, "SIZE", "a size such as 80GB or 24GiB", example, text, parse, value};
}

static Flag ramp(const char* name, int subcommands, BatchRamp& to, const char* example, const char* text) {
    auto parse = [&to](const std::string& s) {
        const size_t colon = std::min(s.find(':'), s.size());
        return parse_number(s.substr(0, colon), to.from) && parse_number(s.substr(colon).erase(0, 1), to.tokens) &&
               to.from > 0 && to.from <= MAX_STEP_TOKENS && to.tokens > 0;
    };
    auto value = [&to] { return to.tokens ? json(format("%ld:%ld", to.from, to.tokens)) : json(); };
    return {name, subcommands, "FROM:TOKENS", "two whole numbers of tokens, at least 1, such as 8192:1000000", example,
            text, parse, value};
}

template <typename E, size_t N>
static Flag choice(const char* name, int subcommands, E& to, const char* const (&words)[N], const char* example,
                   const char* text) {
    const std::vector<std::string> names(words, words + N);
    auto parse = [&to, names](const std::string& s) {
        const auto found = std::find(names.begin(), names.end(), s);
        if (found == names.end()) return false;
        to = static_cast<E>(found - names.begin());
        return true;
    };
    // A default without a name: the value depends on other options.
    auto value = [&to, names] { return size_t(to) < names.size() ? json(names[size_t(to)]) : json(); };
    return {name, subcommands, joined(names, "|", "|"), joined(names, ", ", " or "), example, text, parse, value};
}

template <typename T>
static Flag toggle(const char* name, int subcommands, T& to, const char* example, const char* text) {
    auto parse = [&to](const std::string& s) { return s.empty() && (to = 1); };
    return {name, subcommands, "", "", example, text, parse, [&to] { return json(to != 0); }, true};
}

// ---- the table ----------------------------------------------------------------------------------
// Groups and flags are in the order of --help: the most used flags of a group come first.

std::vector<Flag> flag_table(Options& o) {
    const std::pair<const char*, std::vector<Flag>> groups[] = {{"model", {
        text("--model", COMMON | TRAIN | PLAN, "NAME", o.model, "gpt2-medium",
             "Size of a new model, such as gpt2 or gpt3-350m. Names: gpt2, gpt2-medium, gpt2-large, gpt2-xl, "
             "gpt3-125m, -350m, -760m, -1.3b, -2.7b, -6.7b, -13b; for plan also 1b, 7b, 70b and 405b. --layers, "
             "--heads, --channels, --context and --vocab override its sizes."),
        text("--from", COMMON | ALL, "DIR", o.from, "./train_gpt eval --from models/gpt2 --data data/shakespeare.txt",
             "Hugging Face GPT-2 folder to start from, evaluate or sample. It has config.json, model.safetensors and, "
             "for text, a tokenizer. A run's folder stands for its last checkpoint. Without --from, train initialises "
             "weights at random."),
        number("--layers", COMMON | TRAIN | PLAN, "N", o.layers, {1}, "6", "Number of layers (default: the model's)"),
        number("--heads", COMMON | TRAIN | PLAN, "N", o.heads, {1}, "6",
               "Attention heads per layer (default: the model's). channels / heads must be 16, 32, ... or 128."),
        number("--channels", COMMON | TRAIN | PLAN, "N", o.channels, {1}, "384",
               "Channels of the residual stream (default: the model's)"),
        number("--context", COMMON | TRAIN | PLAN, "T", o.context, {1}, "256",
               "Positions of a new model, its longest sequence; --seq-len may be shorter (default: the model's)"),
        number("--vocab", TRAIN | PLAN, "N", o.vocab, {1}, "512",
               "Vocabulary size (default: 256 for data in bytes, else the model's)"),
        number("--eot", TRAIN, "TOKEN", o.eot, {0}, "./train_gpt --data \"data/*.bin\" --vocab 32000 --eot 0",
               "End-of-text token of a new model on shards (default: 50256 for GPT-2's, else the last token). "
               "config.json has it, and samples begin with it."),
    }}, {"data", {
        text("--data", COMMON | TRAIN | EVAL, "PATTERN", o.data, "./train_gpt --data \"data/*.txt\" --out runs/mine",
             "Text files or .bin token shards to train on or evaluate. Globs are allowed. The tokenizer in --from "
             "tokenizes text; without one, each byte is a token. Shards have llm.c's format (data/README.md)."),
        text("--val-data", COMMON | TRAIN, "PATTERN", o.val_data, "data/shakespeare.txt",
             "Data for the validation loss (default: the end of --data)"),
        number("--val-fraction", TRAIN | EVAL, "X", o.val_fraction, {0, 0.9}, "0.05",
               "Fraction at the end of --data for validation, unless --val-data is given (default: 0.1; eval: all of "
               "--data). With the run's value, eval evaluates the tokens that training validates on."),
        choice("--shuffle", TRAIN, o.shuffle, {"no", "yes"}, "no", "Shuffle training windows; no: in file order"),
        text("--hellaswag", TRAIN | EVAL, "FILE", o.hellaswag,
             "./train_gpt eval --from data/reference/hf_tiny --hellaswag data/reference/hellaswag.bin",
             "HellaSwag questions to answer with each validation loss. scripts/prepare.sh hellaswag writes the file "
             "for GPT-2's tokenizer."),
    }}, {"batch and memory", {
        or_word("auto", o.micro_batch, AUTO, number("--micro-batch", COMMON | TRAIN | EVAL | PLAN, "B", o.micro_batch,
                {1, MAX_SEQUENCES}, "--micro-batch auto --total-batch 65536",
                "Sequences in a GPU's forward and backward pass; --total-batch counts the tokens of a step. auto: as "
                "many as fit in memory and divide --total-batch.")),
        number("--total-batch", COMMON | TRAIN | PLAN, "TOKENS", o.total_batch, {1, MAX_STEP_TOKENS}, "65536",
               "Tokens per optimizer step, over all GPUs and micro-batches (default: one --micro-batch per GPU). "
               "Gradients accumulate, so it must be a multiple of micro-batch x sequence x GPUs."),
        ramp("--batch-ramp", TRAIN, o.batch_ramp, "--total-batch 65536 --batch-ramp 8192:1000000",
             "Start with batches of FROM tokens, which grow linearly to --total-batch over the first TOKENS tokens. "
             "They grow by whole micro-batches, so FROM must be a multiple of micro-batch x sequence x GPUs."),
        number("--seq-len", COMMON | ALL, "T", o.seq_len, {1}, "512",
               "Tokens per sequence, at most the model's --context (default: the model's context)"),
        choice("--recompute", COMMON | TRAIN | PLAN, o.recompute, {"none", "selective", "full"}, "selective",
               "Activations that backward recomputes, to save memory. selective: LayerNorm outputs and GELU; full: "
               "everything but the residual stream. The loss stays the same to the bit, unless --matmul-tuning has "
               "fused GELU with a matmul, which it does only with none."),
        choice("--attention", ALL, o.attention, {"flash", "naive"}, "naive", "Attention algorithm; --tensor-cores "
               "selects the instructions of flash. naive stores the T x T scores and probabilities, which shows the "
               "memory that flash attention saves."),
    }}, {"precision", {
        choice("--matmul", COMMON | TRAIN | PLAN, o.matmul, MATMUL_NAMES, "fp8",
               "Precision of the blocks' matmuls alone; plain: that of the build, make PRECISION=. fp8: FP8, except "
               "for weight gradients; fp8-all: FP8 for them too. FP8 needs a BF16 build, and a GPU from Ada on or a "
               "CPU."),
        choice("--fp8-scaling", TRAIN, o.fp8_scaling, FP8_SCALING_NAMES, "--matmul fp8 --fp8-scaling current",
               "Where FP8 scales come from. delayed: the amax of the last 16 steps; current: the tensor's own amax; "
               "none: all scales are 1, a demonstration of underflow."),
        choice("--fp8-accumulation", TRAIN, o.fp8_accumulation, FP8_ACCUMULATION_NAMES,
               "--matmul fp8 --fp8-accumulation fast", "Sums of FP8 matmuls in forward; of gradients: fp32. "
               "fast: in the shorter format of Hopper's tensor cores."),
        choice("--grad-dtype", TRAIN | PLAN, o.grad_dtype, {"fp32", "bf16", "fp16"}, "fp32", "Storage and accumulation "
               "type of gradients. A 16-bit type must be the weights': bf16 in a BF16 build, fp16 in an FP16 build."),
        choice("--master-weights", TRAIN | PLAN, o.master_weights, {"fp32", "none"}, "fp32", "AdamW's FP32 copy of "
               "16-bit weights. none is a demonstration: small updates are rounded away, and the log counts them."),
        or_word("dynamic", o.loss_scaling, DYNAMIC_SCALE, or_word("none", o.loss_scaling, NO_SCALE,
                number("--loss-scaling", TRAIN, "X", o.loss_scaling, {1, MAX_LOSS_SCALE}, "none", "Factor of the loss "
                "in backward (default: dynamic in FP16, else none). dynamic halves it after an overflow and doubles it "
                "after 2,000 good steps. none in FP16 is a demonstration: gradients below 6e-8 underflow to 0."))),
    }}, {"optimizer", {
        number("--steps", COMMON | TRAIN, "N", o.steps, {1, MAX_STEPS}, "5000", "Length of the run in optimizer steps"),
        number("--tokens", COMMON | TRAIN, "N", o.tokens, {0, MAX_STEPS}, "10000000",
               "Length of the run in tokens, instead of --steps (default: none). The last step may exceed it. 0: as "
               "--steps says."),
        number("--minutes", TRAIN, "M", o.minutes, {}, "5",
               "Length of the run in minutes, instead of --steps (default: none). The learning rate follows the "
               "clock, so two runs differ in their bits. Resumed runs continue with the rest. 0: as --steps says."),
        number("--lr", COMMON | TRAIN, "X", o.lr, {}, "3e-4", "Peak learning rate. To fine-tune with --from, about 3e-5."),
        number("--min-lr", TRAIN, "X", o.min_lr, {}, "0", "Learning rate at the last step (default: a tenth of --lr)"),
        number("--warmup", COMMON | TRAIN, "STEPS", o.warmup, {0, MAX_STEPS}, "100",
               "Steps in which the learning rate rises linearly to --lr (default: none). Below 1: a fraction of the "
               "run, which follows --tokens and --minutes."),
        choice("--schedule", COMMON | TRAIN, o.schedule, {"cosine", "linear", "wsd", "constant"}, "wsd",
               "Learning rate after warm-up. cosine, linear: decay to --min-lr; wsd: constant, then linear decay in "
               "the last fifth of steps."),
        choice("--optimizer", TRAIN | PLAN, o.optimizer, {"adamw", "muon"}, "muon", "Optimizer of the layers' weight "
               "matrices. muon orthogonalises their updates, without a second moment; AdamW updates all else."),
        number("--weight-decay", COMMON | TRAIN, "X", o.weight_decay, {}, "0.05",
               "Weight decay of matrices and embeddings"),
        number("--grad-clip", TRAIN, "X", o.grad_clip, {}, "0.5", "Maximum norm of the gradient; 0: no clipping"),
        or_word("off", o.skip_spikes, 0.0, number("--skip-spikes", TRAIN, "Z", o.skip_spikes, {1e-3, MAX_Z}, "5",
                "Skip the update of a step whose loss or gradient norm is more than Z standard deviations above the "
                "mean of the last 128 steps. log.jsonl has this z-score in any case; of 128 values it is at most "
                "sqrt(127).")),
        number("--beta1", TRAIN, "X", o.beta1, {0, 0.999999}, "0.9", "AdamW's decay rate of the first moment"),
        number("--beta2", TRAIN, "X", o.beta2, {0, 0.999999}, "0.99", "AdamW's decay rate of the second moment"),
        number("--eps", TRAIN, "X", o.eps, {}, "1e-6", "AdamW's epsilon, added to the denominator"),
        number("--noise-every", TRAIN, "STEPS", o.noise_every, {}, "--total-batch 65536 --noise-every 10",
               "Steps between estimates of the gradient noise scale for log.jsonl; 0: never (default: never). They "
               "need at least two micro-batches in a step or several GPUs, with --zero 0 or 1."),
        number("--seed", TRAIN | SAMPLE, "N", o.seed, {}, "1", "Seed of initial weights, data order and samples"),
    }}, {"run", {
        text("--out", COMMON | TRAIN, "DIR", o.out, "runs/mine",
             "Folder for log.jsonl and checkpoints (default: nothing is saved)"),
        or_word("auto", o.resume, AUTO, toggle("--resume", COMMON | TRAIN, o.resume,
                "./train_gpt --resume --out runs/mine --steps 2000", "Resume from the last checkpoint in --out. The "
                "run's options apply unless others are given. auto: start a run if --out holds none, so that one "
                "command does both, for launchers that restart it.")),
        number("--eval-every", COMMON | TRAIN, "STEPS", o.eval_every, {}, "100",
               "Steps between validation losses; 0: never. If not 0, there is also one at the end."),
        number("--eval-sequences", TRAIN, "N", o.eval_sequences, {}, "0", "Sequences per validation loss; 0: all"),
        number("--checkpoint-every", COMMON | TRAIN, "STEPS", o.checkpoint_every, {},
               "--out runs/mine --checkpoint-every 500", "Steps between checkpoints; 0: never. If not 0, there is "
               "also one at the end."),
        number("--keep", TRAIN, "N", o.keep, {}, "--out runs/mine --keep 2",
               "Number of newest checkpoints to keep; 0: all (default: all)"),
        number("--sample-every", COMMON | TRAIN, "STEPS", o.sample_every, {}, "100", "Steps between samples; 0: never "
               "(default: never). If not 0, there is also one before the first step and one at the end."),
        text("--trace", TRAIN, "FILE", o.trace, "trace.json", "Write a Chrome trace of the first three steps, for "
             "ui.perfetto.dev. It shows launches, kernels, copies and live bytes."),
        toggle("--verbose", TRAIN | EVAL, o.verbose, "--verbose",
               "Print details at the start: memory by category, kernels, matmul tuning. log.jsonl has them too."),
        choice("--tensor-cores", TRAIN | EVAL | SAMPLE, o.tensor_cores, TENSOR_CORE_NAMES, "none",
               "Instructions of flash attention on a GPU's tensor cores; --tensor-parallel is about several GPUs. "
               "mma: from Ampere on; wgmma: Hopper; auto: the best available."),
        choice("--matmul-tuning", TRAIN | EVAL, o.matmul_tuning, {"off", "on"}, "off", "Time cuBLASLt's algorithms and "
               "use the fastest. The choices are stored in ~/.cache/gpt.cu/matmul.json. off: cuBLASLt's first choice."),
        choice("--graph", TRAIN | EVAL, o.graph, {"auto", "off", "on"}, "on",
               "Launch a pass as one CUDA graph; auto: on a GPU"),
        choice("--peak", TRAIN, o.peak, {"table", "measured"}, "measured",
               "Peak FLOP/s for MFU (model FLOPs utilisation): the GPU's data sheet or a timed matmul"),
        number("--threads", TRAIN | EVAL | SAMPLE, "N", o.threads, {1, MAX_THREADS}, "2",
               "Threads of the CPU build (default: one per core)"),
    }}, {"sampling", {
        text("--prompt", SAMPLE, "TEXT", o.prompt, "Hello",
             "Text to continue; - reads standard input. Needs a tokenizer in --from, or a model of bytes."),
        number("--temperature", TRAIN | SAMPLE, "X", o.temperature, {}, "0.8",
               "Divisor of the logits; 0: always the likeliest token"),
        number("--top-k", TRAIN | SAMPLE, "K", o.top_k, {}, "40",
               "Sample from the K likeliest tokens; 0: from all (default: all)"),
        number("--top-p", TRAIN | SAMPLE, "P", o.top_p, {0, 1}, "0.9",
               "Sample from the likeliest tokens of total probability P"),
        number("--sample-tokens", TRAIN | SAMPLE, "N", o.sample_tokens, {1}, "100",
               "Length of a sample in tokens; --tokens is that of a run"),
        number("--samples", SAMPLE, "N", o.samples, {1}, "--samples 3 --seed 1",
               "Number of samples. They use the seeds --seed, --seed + 1, and so on."),
        text("--stop", SAMPLE, "TEXT", o.stop, "Question:", "End a sample before this text"),
        text("--prompt-tokens", SAMPLE, "IDS", o.prompt_tokens,
             "./train_gpt sample --from data/reference/hf_tiny --prompt-tokens 15,9,5",
             "Token ids to continue, such as 15496,995; - reads standard input"),
    }}, {"multi-GPU", {
        or_word("all", o.gpus, ALL_GPUS, number("--gpus", COMMON | TRAIN | EVAL | PLAN, "N", o.gpus, {1, MAX_GPUS},
                "--gpus 2 --zero 1", "GPUs of this machine, one process each. On several machines use torchrun, srun "
                "or mpirun (dev/many_gpus.md).")),
        number("--tensor-parallel", TRAIN | EVAL | PLAN, "T", o.tensor_parallel, {1, 128},
               "--gpus 2 --tensor-parallel 2",
               "GPUs that share each layer (tensor parallelism), unlike --tensor-cores, which are in each GPU. They "
               "split attention's heads and the MLP's channels, and between them the rows. They must be on one "
               "machine. T must divide --gpus, the heads and the sequence."),
        number("--zero", TRAIN | PLAN, "STAGE", o.zero, {0, 3}, "--gpus 2 --zero 1",
               "ZeRO stage: 1 shards optimizer states, 2 also gradients, 3 also parameters (default: none). The "
               "master weights count as optimizer states."),
        choice("--overlap", TRAIN, o.overlap, {"off", "on"}, "--gpus 2 --overlap off",
               "Overlap communication with computation"),
        number("--timeout", TRAIN | EVAL, "SECONDS", o.timeout, {1}, "--gpus 2 --timeout 60",
               "Abort the run if a rank makes no progress for this many seconds"),
    }}, {"planning", {
        size("--gpu-memory", PLAN, o.gpu_memory, "80GB", "Memory of the GPU to plan for (default: this device's)"),
        choice("--precision", PLAN, o.precision, {"fp32", "bf16", "fp16"}, "fp16",
               "Precision to plan for; --matmul adds FP8 (default: bf16 with --gpu-memory, else the build's). Training "
               "uses the build's: make PRECISION=fp32, bf16 or fp16."),
        toggle("--scan", PLAN, o.scan,
               "--scan --model 7b --gpus 8 --gpu-memory 80GB --total-batch 524288 --bandwidth 450",
               "List the fastest layouts that fit. It tries --gpus and the smaller powers of two, --tensor-parallel 1 "
               "to 8 (the GPUs of a machine), each ZeRO stage and each --recompute. Needs --total-batch and "
               "--bandwidth."),
        number("--bandwidth", PLAN, "GB/S", o.bandwidth, {1e-3, 1e6}, "--gpus 8 --gpu-memory 80GB --bandwidth 450",
               "GB/s that each GPU sends to others of --gpus, to estimate a step's time (default: no estimate). "
               "NVLink of an H100: 450; 400 Gb/s InfiniBand: 50."),
        number("--tensor-bandwidth", PLAN, "GB/S", o.tensor_bandwidth, {1e-3, 1e6},
               "--gpus 8 --tensor-parallel 2 --gpu-memory 80GB --bandwidth 50 --tensor-bandwidth 300",
               "GB/s that each GPU sends within its group of --tensor-parallel; --bandwidth is that of all else"),
        number("--flops", PLAN, "TFLOPS", o.flops, {1e-3, 1e6}, "--gpus 8 --bandwidth 450 --flops 300",
               "TFLOP/s that each GPU sustains (default: 400 in 16 bits, 27 in FP32). The defaults are 40 % of an "
               "H100's peak."),
        toggle("--json", PLAN, o.as_json, "--gpu-memory 80GB --json", "Print one JSON object instead of a table"),
    }}};
    std::vector<Flag> table;
    for (const auto& [group, flags] : groups)
        for (Flag flag : flags) flag.group = group, table.push_back(flag);
    return table;
}

// ---- suggestions --------------------------------------------------------------------------------

// Names that other trainers use for a flag or subcommand.
static const std::map<std::string, const char*> ALIASES = {
    {"--from", "init-from load checkpoint pretrained"}, {"--layers", "n-layer num-layers depth"},
    {"--heads", "n-head num-attention-heads"}, {"--channels", "n-embd d-model hidden-size width"},
    {"--context", "n-ctx n-positions"}, {"--data", "dataset input train-data train-bin"},
    {"--val-data", "val-bin eval-data"}, {"--micro-batch", "batch-size bs"},
    {"--total-batch", "global-batch-size gradient-accumulation-steps"},
    {"--seq-len", "block-size sequence-length max-length"},
    {"--recompute", "gradient-checkpointing activation-checkpointing"}, {"--matmul", "fp8"},
    {"--precision", "dtype bf16 fp16"}, {"--steps", "max-iters num-iterations epochs"}, {"--lr", "learning-rate"},
    {"--schedule", "lr-scheduler lr-decay"}, {"--weight-decay", "wd"}, {"--grad-clip", "max-grad-norm clip"},
    {"--skip-spikes", "sl sg"}, {"--beta1", "adam-beta1"}, {"--beta2", "adam-beta2"}, {"--out", "save-dir"},
    {"--eval-every", "eval-interval val-loss-every"}, {"--eval-sequences", "eval-iters val-max-steps"},
    {"--checkpoint-every", "save-interval save-every"}, {"--trace", "profile"}, {"--graph", "compile"},
    {"--prompt", "start"}, {"--samples", "num-samples"}, {"--sample-tokens", "max-new-tokens"},
    {"--gpus", "nproc-per-node world-size devices"}, {"--tensor-parallel", "tp tensor-model-parallel-size"},
    {"--zero", "fsdp zero-stage"}, {"train", "finetune"}, {"eval", "test"}, {"sample", "generate"}, {"plan", "memory"}};

// Returns a name in lower case, without dashes before it, with - for _.
static std::string bare(std::string name) {
    name.erase(0, name.find_first_not_of('-'));
    for (char& c : name) c = c == '_' ? '-' : static_cast<char>(tolower(static_cast<unsigned char>(c)));
    return name;
}

// Returns how different two names are: twice their edit distance, at most 3 if one begins with the other, at most 5 if
// one contains the other. NONE: they are not similar.
static size_t difference(const std::string& a, const std::string& b) {
    std::vector<size_t> row(b.size() + 1);   // edit distances of the first i characters of a and the first j of b
    std::iota(row.begin(), row.end(), 0);
    for (size_t i = 1; i <= a.size(); i++) {
        size_t diagonal = std::exchange(row[0], i);
        for (size_t j = 1; j <= b.size(); j++)
            diagonal = std::exchange(row[j], std::min({diagonal + (a[i - 1] != b[j - 1]), row[j] + 1, row[j - 1] + 1}));
    }
    const auto& [shorter, longer] = std::minmax(a, b, [](auto& x, auto& y) { return x.size() < y.size(); });
    const size_t edits = 3 * row.back() <= a.size() + 1 ? 2 * row.back() : NONE;
    const size_t place = shorter.size() < 3 ? NONE : longer.find(shorter);
    return std::min(edits, place == NONE ? NONE : place == 0 ? 3 : 5);
}

// Returns a hint for an unknown word: the most similar one of `names`, or --help.
static std::string advice(const std::string& word, const std::vector<std::string>& names) {
    std::string best;
    size_t least = NONE;
    for (const std::string& name : names) {
        const auto aliases = ALIASES.find(name);
        std::istringstream candidates(bare(name) + " " + (aliases == ALIASES.end() ? "" : aliases->second));
        for (std::string candidate; candidates >> candidate;)
            if (const size_t d = difference(bare(word), candidate); d < least) least = d, best = name;
    }
    return best.empty() ? "--help lists them" : "did you mean " + best + "?";
}

static UserError no_such_flag(const std::string& word, const std::vector<Flag>& flags) {
    std::vector<std::string> names;
    for (const Flag& flag : flags) names.push_back(flag.name);
    return UserError("%s: no such flag; %s", shell_word(word).c_str(), advice(word, names).c_str());
}

// ---- help ---------------------------------------------------------------------------------------

static std::vector<std::string> names_of(int subcommands) {
    std::vector<std::string> names;
    for (const auto& [name, subcommand] : SUBCOMMANDS)
        if (subcommands & subcommand) names.push_back(name);
    return names;
}

// A flag's text in two parts, without "(default: ...)", and its default, which is empty if there is none.
struct Explanation { std::string first, rest, by_default; };
static Explanation explain(const Flag& flag) {
    const std::string text = flag.text, mark = " (default: ";
    const size_t end = std::min(text.find(". "), text.size()), open = text.find(mark);
    const std::string rest = end < text.size() ? text.substr(end + 2) : "";
    if (open < end) return {text.substr(0, open), rest, text.substr(open + mark.size(), end - 1 - open - mark.size())};
    const json value = flag.value();
    std::string by_default = value.is_number_float() ? format("%g", double(value)) : value.dump();
    if (value.is_string() && value != "\n") by_default = value;
    return {text.substr(0, end), rest, flag.is_switch || value.is_null() ? "" : by_default};
}

// Returns `line` and the words of `text`, broken into lines of at most `width` columns. Words are indented by `indent`
// columns; they begin on a new line if `line` is longer than that. Each line but the last ends with `ending`.
static std::string wrapped(std::string line, const std::string& text, size_t indent, size_t width,
                           const std::string& ending = "\n") {
    std::string lines;
    std::istringstream words(text);
    if (line.size() >= indent) lines = std::exchange(line, "") + ending;
    line.resize(indent - 1, ' ');
    for (std::string word; words >> word; line += " " + word)
        if (line.size() >= indent && line.size() + word.size() + ending.size() > width)
            lines += std::exchange(line, std::string(indent - 1, ' ')) + ending;
    return lines + line + "\n";
}

// Returns a flag and its value, as in --lr X.
static std::string usage_of(const Flag& flag) {
    return flag.name + std::string(flag.placeholder.empty() ? "" : " ") + flag.placeholder;
}

size_t terminal_columns() {
    winsize window = {};
    return ioctl(STDOUT_FILENO, TIOCGWINSZ, &window) == 0 ? window.ws_col : 0;
}

size_t help_width() {
    long width = 100;
    if (const size_t columns = terminal_columns()) width = static_cast<long>(columns);
    else if (const char* columns = getenv("COLUMNS")) parse_number(columns, width);
    return static_cast<size_t>(std::max(width, 60L));
}

std::string example_command(const Flag& flag) {
    const std::string example = flag.example, group = flag.group;
    if (begins_with(example, "./")) return example;
    const char* begin = group == "sampling" ? "sample --from models/gpt2" : group == "planning" ? "plan"
                        : "--data data/shakespeare.txt";
    return format("./train_gpt %s ", begin) + (example[0] == '-' ? "" : flag.name + std::string(" ")) + example;
}

static std::string help_of_flag(const Flag& flag, size_t width) {
    const Explanation e = explain(flag);
    const std::string command = example_command(flag);
    const bool from_gpt2 = command.find("models/gpt2") != command.npos;
    const std::pair<const char*, std::string> lines[] = {{"values", flag.values}, {"default", e.by_default},
        {"used by", joined(names_of(flag.subcommands))}, {"needs", from_gpt2 ? "scripts/download.sh gpt2" : ""}};
    std::string help = wrapped(usage_of(flag), e.first + ". " + e.rest, 4, width) + "\n";
    for (const auto& [name, text] : lines)
        if (!text.empty()) help += wrapped(format("    %s:", name), text, 14, width);
    return help + wrapped("    example:", command, 14, width, " \\\n");
}

// Returns a page with all flags.
static std::string markdown(const std::vector<Flag>& flags) {
    std::string group, text =
        "# Options of train_gpt\n\n"
        "`./train_gpt --help all` lists the options, `./train_gpt --help FLAG` explains one with an example. "
        "`--flag VALUE`\nand `--flag=VALUE` mean the same. If a flag is repeated, the last value counts.\n";
    for (const Flag& flag : flags) {
        const Explanation e = explain(flag);
        if (std::exchange(group, flag.group) != flag.group)
            text += format("\n## %s\n\n| option | values | default | used by | meaning |\n|---|---|---|---|---|\n",
                           flag.group);
        text += format("| `%s` | %s | %s | %s | %s%s%s |\n", flag.name, flag.values.c_str(), e.by_default.c_str(),
                       joined(names_of(flag.subcommands)).c_str(), e.first.c_str(), e.rest.empty() ? "" : ". ",
                       e.rest.c_str());
    }
    return text;
}

struct Usage { const char *arguments, *purpose; };
const Usage USAGE[] = {   // in the order of SUBCOMMANDS
    {"[train] --data PATTERN [options]", "trains a model"},
    {"eval --from DIR [--data PATTERN] [--hellaswag FILE] [options]", "prints a model's loss and HellaSwag score"},
    {"sample --from DIR [--prompt TEXT] [options]", "continues a text"},
    {"plan [options]", "predicts memory and time of a training run"}};

std::string help_text(int subcommands, const std::string& topic, size_t width) {
    Options defaults;
    const std::vector<Flag> flags = flag_table(defaults);
    if (topic == "markdown") return markdown(flags);
    for (const auto& [name, subcommand] : SUBCOMMANDS)
        if (topic == name) return help_text(subcommand, "", width);
    for (const Flag& flag : flags)
        if (topic == flag.name || topic == flag.name + 2) return help_of_flag(flag, width);
    if (!topic.empty() && topic != "all") throw no_such_flag(topic, flags);
    const bool brief = topic.empty() && subcommands & TRAIN;
    std::string help, group;
    for (size_t i = 0; i < std::size(USAGE); i++) {
        const auto& [name, subcommand] = SUBCOMMANDS[i];
        if (brief && subcommand != TRAIN)
            help += wrapped(format("       ./train_gpt %s --help", name), USAGE[i].purpose, 34, width);
        else if (subcommands & subcommand)
            help += wrapped(help.empty() ? "usage:" : "",
                            format("./train_gpt %s  # %s", USAGE[i].arguments, USAGE[i].purpose), 7, width);
    }
    help += brief ? "\nOptions of most runs; ./train_gpt --help all lists all.\n" : "\n";
    help += "./train_gpt --help FLAG explains one option.\n";
    for (const Flag& flag : flags) {
        if (!(flag.subcommands & (brief ? COMMON : subcommands))) continue;
        const Explanation e = explain(flag);
        std::string notes = e.by_default.empty() ? "" : "default:\1" + e.by_default;   // \1: a space without a break
        if (subcommands == ALL && !(flag.subcommands & TRAIN))
            notes += (notes.empty() ? "" : "; ") + joined(names_of(flag.subcommands)) + " only";
        if (std::exchange(group, flag.group) != flag.group) help += format("\n%s\n", flag.group);
        help += wrapped("  " + usage_of(flag), e.first + (notes.empty() ? "" : " (" + notes + ")"), 30, width);
    }
    std::replace(help.begin(), help.end(), '\1', ' ');
    return help;
}

std::optional<std::string> help_topic(const std::vector<std::string>& args) {
    for (size_t i = 0; i < args.size(); i++) {
        if (begins_with(args[i], "--help=")) return args[i].substr(strlen("--help="));
        if (args[i] == "--help" || args[i] == "-h") return i + 1 < args.size() ? args[i + 1] : "";
    }
    return {};
}

// ---- parsing ------------------------------------------------------------------------------------

const std::pair<const char*, Subcommand>& parse_subcommand(const std::string& word) {
    for (const auto& named : SUBCOMMANDS)
        if (word == named.first) return named;
    throw UserError("%s: no such subcommand; expected %s; %s", shell_word(word).c_str(),
                    joined(names_of(ALL), ", ", " or ").c_str(), advice(word, names_of(ALL)).c_str());
}

Options parse_options(Subcommand subcommand, const char* name, const std::vector<std::string>& args) {
    Options options;
    const std::vector<Flag> flags = flag_table(options);
    auto find = [&](const std::string& word) {
        return std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return word == f.name; });
    };
    for (size_t i = 0; i < args.size(); i++) {
        const size_t equals = begins_with(args[i], "--") ? args[i].find('=') : NONE;   // in --flag=value
        const std::string word = args[i].substr(0, equals);
        const auto flag = find(word);
        if (flag == flags.end()) throw no_such_flag(word, flags);
        if (!(flag->subcommands & subcommand))
            throw UserError("%s: not a flag of %s, but of %s; ./train_gpt --help %s explains it", flag->name, name,
                            joined(names_of(flag->subcommands)).c_str(), flag->name);
        std::string value = equals == NONE ? "" : args[i].substr(equals + 1);
        if (flag->is_switch && flag->values.empty() && equals != NONE)
            throw UserError("%s: takes no value; expected %s, found '%s'", args[i].c_str(), flag->name, value.c_str());
        if (!flag->is_switch && equals == NONE) {
            const bool at_end = i + 1 == args.size();
            if (at_end || find(args[i + 1]) != flags.end())
                throw UserError("%s: value missing; expected %s, found %s", flag->name, flag->values.c_str(),
                                at_end ? "nothing" : ("'" + args[i + 1] + "'").c_str());
            value = args[++i];
        }
        const std::string next = i + 1 < args.size() ? args[i + 1] : "";
        if (flag->is_switch && equals == NONE && !next.empty() && flag->parse(next)) value = args[++i];
        if (!flag->parse(value))
            throw UserError("%s %s: invalid value; expected %s, found '%s'", flag->name, shell_word(value).c_str(),
                            flag->values.c_str(), value.c_str());
        options.given.insert(flag->name);
    }
    for (const std::set<std::string>& alternatives : {BUDGETS, std::set<std::string>{"--prompt", "--prompt-tokens"}}) {
        std::vector<std::string> found;
        std::set_intersection(alternatives.begin(), alternatives.end(), options.given.begin(), options.given.end(),
                              std::back_inserter(found));
        if (found.size() > 1)
            throw UserError("%s: expected only one of these options", joined(found, " and ", " and ").c_str());
    }
    return options;
}

json describe(Options options, Subcommand subcommand) {
    json all;
    for (const Flag& flag : flag_table(options))
        if (flag.subcommands & subcommand) all[flag.name + 2] = flag.value();
    return all;
}
