#include "options.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

static Flag text_flag(const char* name, int subcommands, const char* takes, std::string& to, const char* help) {
    auto parse = [&to](const std::string& s) {
        to = s;
        return !s.empty();
    };
    return {name, subcommands, takes, help, parse, [&to] { return json(to); }};
}

template <typename T>
static Flag number_flag(const char* name, int subcommands, T& to, T least, T most, const char* help) {
    std::string takes = format(std::is_integral_v<T> ? "a whole number from %g" : "a number from %g", double(least));
    takes += most == std::numeric_limits<T>::max() ? " on" : format(" to %.8g", double(most));
    auto parse = [&to, least, most](const std::string& s) {
        T value;
        if (!parse_number(s, value) || value < least || value > most) return false;
        to = value;
        return true;
    };
    // A default below `least` means that the value follows from something else.
    return {name, subcommands, takes, help, parse, [&to, least] { return to < least ? json() : json(to); }};
}

// The same flag, which also accepts a word.
template <typename T> static Flag or_word(Flag flag, const char* word, T& to, T meaning) {
    flag.takes = std::string(word) + "|" + flag.takes;
    flag.parse = [=, &to](const std::string& s) {
        if (s == word) to = meaning;
        return s == word || flag.parse(s);
    };
    flag.value = [=, &to] { return to == meaning ? json(word) : flag.value(); };
    return flag;
}

// A size in bytes, 0 if it is not given.
static Flag size_flag(const char* name, int subcommands, double& to, const char* help) {
    auto parse = [&to](const std::string& s) {
        for (const auto& [unit, factor] : {std::pair{"GiB", 0x1p30}, {"MiB", 0x1p20}, {"GB", 1e9}, {"MB", 1e6}}) {
            double number;
            if (!ends_with(s, unit) || !parse_number(s.substr(0, s.size() - strlen(unit)), number)) continue;
            to = number * factor;
            return number > 0 && to < 0x1p56;
        }
        return false;
    };
    return {name, subcommands, "a size such as 80GB or 24GiB", help, parse, [&to] { return to ? json(to) : json(); }};
}

template <typename E>
static Flag choice_flag(const char* name, int subcommands, E& to, std::vector<std::string> names, const char* help) {
    std::string takes;
    for (const std::string& choice : names) takes += (takes.empty() ? "" : "|") + choice;
    auto parse = [&to, names](const std::string& s) {
        const auto found = std::find(names.begin(), names.end(), s);
        if (found == names.end()) return false;
        to = static_cast<E>(found - names.begin());
        return true;
    };
    // A default that is none of the names means that the value follows from something else.
    auto value = [&to, names] {
        const size_t i = static_cast<size_t>(to);
        return i < names.size() ? json(names[i]) : json();
    };
    return {name, subcommands, takes, help, parse, value};
}

static Flag switch_flag(const char* name, int subcommands, bool& to, const char* help) {
    auto parse = [&to](const std::string&) { return to = true; };
    return {name, subcommands, "", help, parse, [&to] { return json(to); }, true};
}

constexpr int ANY_INT = std::numeric_limits<int>::max();
constexpr long ANY_LONG = std::numeric_limits<long>::max();
constexpr double ANY = std::numeric_limits<float>::max();   // what becomes a float on the device

std::vector<Flag> flag_table(Options& o) {
    return {
        text_flag("--model", TRAIN | PLAN, "NAME", o.model,
                  "gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt3-125m ... gpt3-13b; to plan also 1b, 7b, 70b, 405b"),
        number_flag("--layers", TRAIN | PLAN, o.layers, 1, ANY_INT, "instead of the model's"),
        number_flag("--heads", TRAIN | PLAN, o.heads, 1, ANY_INT, "likewise; channels / heads must be 16, 32, ... 128"),
        number_flag("--channels", TRAIN | PLAN, o.channels, 1, ANY_INT, "likewise"),
        number_flag("--context", TRAIN | PLAN, o.context, 1, ANY_INT, "likewise: the number of positions"),
        number_flag("--vocab", TRAIN | PLAN, o.vocab, 1, ANY_INT, "likewise; for data that is bytes 256 by default"),
        text_flag("--from", ALL, "DIR", o.from,
                  "a Hugging Face GPT-2 folder (config.json, model.safetensors), or a run's, to start from"),
        text_flag("--data", TRAIN | EVAL, "PATTERN", o.data,
                  ".bin shards of tokens, or text, by the tokenizer in --from or else as bytes; globs allowed"),
        text_flag("--val-data", TRAIN, "PATTERN", o.val_data, "data for the validation loss"),
        text_flag("--hellaswag", TRAIN | EVAL, "FILE", o.hellaswag,
                  "of scripts/prepare_hellaswag.py: questions to answer, in training with every validation loss"),
        number_flag("--val-fraction", TRAIN, o.val_fraction, 0.0, 0.9, "validation part of --data, without --val-data"),
        choice_flag("--shuffle", TRAIN, o.shuffle, {"no", "yes"}, "random windows by seed, or the files' order"),
        or_word(number_flag("--micro-batch", TRAIN | EVAL | PLAN, o.micro_batch, 1, MAX_SEQUENCES,
                            "sequences that go through the model at once; auto: as many as fit"),
                "auto", o.micro_batch, AUTO),
        number_flag("--seq-len", ALL, o.seq_len, 1, ANY_INT, "tokens of a sequence (default: the model's context)"),
        number_flag("--total-batch", TRAIN | PLAN, o.total_batch, 1L, MAX_STEP_TOKENS,
                    "tokens of a step, accumulated over micro-batches (default: one micro-batch)"),
        choice_flag("--recompute", TRAIN | PLAN, o.recompute, {"none", "selective", "full"},
                    "which activations are dropped in forward and recomputed in backward"),
        choice_flag("--grad-dtype", TRAIN | PLAN, o.grad_dtype, {"fp32", "bf16", "fp16"},
                    "storage and accumulation type of gradients: fp32, or that of the weights"),
        or_word(or_word(number_flag("--loss-scaling", TRAIN, o.loss_scaling, 1.0, MAX_LOSS_SCALE,
                                    "factor of the gradients in backward; default: dynamic in FP16, none in BF16 and "
                                    "FP32. none in FP16 is a demonstration: gradients below 6e-8 become 0"),
                        "none", o.loss_scaling, NO_SCALE), "dynamic", o.loss_scaling, DYNAMIC_SCALE),
        choice_flag("--master-weights", TRAIN | PLAN, o.master_weights, {"fp32", "none"},
                    "AdamW's copy of the 16-bit weights; none: a demonstration, the log counts the lost updates"),
        choice_flag("--attention", ALL, o.attention, {"flash", "naive"},
                    "naive keeps the T x T scores and probabilities in memory, to see what flash saves"),
        choice_flag("--tensor-cores", TRAIN | EVAL | SAMPLE, o.tensor_cores,
                    {TENSOR_CORE_NAMES.begin(), TENSOR_CORE_NAMES.end()},
                    "used by flash attention: Hopper's (wgmma), Ampere's (mma), none; auto: the best available"),
        choice_flag("--matmul", TRAIN | PLAN, o.matmul, {MATMUL_NAMES.begin(), MATMUL_NAMES.end()},
                    "precision of blocks' matmuls: the build's; FP8 but for weight gradients; FP8"),
        choice_flag("--fp8-scaling", TRAIN, o.fp8_scaling, {FP8_SCALING_NAMES.begin(), FP8_SCALING_NAMES.end()},
                    "scales from the amax of the last 16 steps, or of the tensor itself; none: a demonstration"),
        number_flag("--steps", TRAIN, o.steps, 1L, MAX_STEPS, "optimizer steps"),
        number_flag("--lr", TRAIN, o.lr, 0.0, ANY, "largest learning rate"),
        number_flag("--min-lr", TRAIN, o.min_lr, 0.0, ANY, "learning rate at the end (default: a tenth of --lr)"),
        number_flag("--warmup", TRAIN, o.warmup, 0L, MAX_STEPS, "steps in which the learning rate rises to --lr"),
        choice_flag("--schedule", TRAIN, o.schedule, {"cosine", "linear", "wsd", "constant"},
                    "after the warm-up; wsd: stable, then linear decay over the last fifth"),
        number_flag("--weight-decay", TRAIN, o.weight_decay, 0.0, ANY, "of matrices and embeddings only"),
        number_flag("--beta1", TRAIN, o.beta1, 0.0, 0.999999, "AdamW"),
        number_flag("--beta2", TRAIN, o.beta2, 0.0, 0.999999, "AdamW"),
        number_flag("--eps", TRAIN, o.eps, 0.0, ANY, "AdamW"),
        number_flag("--grad-clip", TRAIN, o.grad_clip, 0.0, ANY, "largest norm of the gradient; 0: not clipped"),
        number_flag("--seed", TRAIN | SAMPLE, o.seed, 0L, ANY_LONG, "of initial weights, order of data and samples"),
        choice_flag("--peak", TRAIN, o.peak, {"table", "measured"},
                    "FLOP/s that MFU is relative to: the card's data sheet, or a large matmul timed at start"),
        choice_flag("--matmul-tuning", TRAIN | EVAL, o.matmul_tuning, {"off", "on"},
                    "times cuBLASLt's algorithms for each matmul once and keeps the fastest"),
        choice_flag("--graph", TRAIN | EVAL, o.graph, {"auto", "off", "on"}, "CUDA graphs; auto: on a GPU"),
        number_flag("--threads", TRAIN | EVAL | SAMPLE, o.threads, 1, MAX_THREADS, "of the CPU build (default: cores)"),
        number_flag("--zero", TRAIN | PLAN, o.zero, 0, 3,
                    "what GPUs share out: 1 optimizer states and master weights, 2 gradients too, 3 weights too"),
        choice_flag("--overlap", TRAIN, o.overlap, {"off", "on"},
                    "whether GPUs send gradients and weights while they compute"),
        number_flag("--timeout", TRAIN | EVAL, o.timeout, 1.0, ANY,
                    "with several GPUs: ends the run if a rank makes no progress for so many seconds"),
        or_word(number_flag("--gpus", TRAIN | EVAL | PLAN, o.gpus, 1, MAX_GPUS,
                            "GPUs of this machine that work together, each with a process"), "all", o.gpus, ALL_GPUS),
        text_flag("--out", TRAIN, "DIR", o.out, "run folder: log.jsonl and checkpoints; without it nothing is written"),
        text_flag("--trace", TRAIN, "FILE", o.trace,
                  "a Chrome trace of the first three steps: launches, kernels, copies, live bytes"),
        switch_flag("--verbose", TRAIN | EVAL, o.verbose,
                    "prints all that the log records at start: memory by category, kernels, matmul tuning"),
        switch_flag("--resume", TRAIN, o.resume, "from the last checkpoint in --out, with the run's options"),
        number_flag("--eval-every", TRAIN, o.eval_every, 0L, ANY_LONG,
                    "steps between validation losses (and one at the end); 0: none"),
        number_flag("--eval-sequences", TRAIN, o.eval_sequences, 0L, ANY_LONG, "of a validation loss; 0: all data"),
        number_flag("--sample-every", TRAIN, o.sample_every, 0L, ANY_LONG,
                    "steps between samples (and one before the first step and at the end); 0: none"),
        number_flag("--sample-tokens", TRAIN | SAMPLE, o.sample_tokens, 1, ANY_INT, "length of a sample"),
        number_flag("--temperature", TRAIN | SAMPLE, o.temperature, 0.0, ANY, "of samples; 0: the likeliest token"),
        number_flag("--top-k", TRAIN | SAMPLE, o.top_k, 0, ANY_INT, "of samples: only the k likeliest tokens; 0: all"),
        number_flag("--top-p", TRAIN | SAMPLE, o.top_p, 0.0, 1.0, "of samples: the likeliest with this probability"),
        number_flag("--checkpoint-every", TRAIN, o.checkpoint_every, 0L, ANY_LONG, "steps (and at the end); 0: none"),
        number_flag("--keep", TRAIN, o.keep, 0, ANY_INT, "how many checkpoints to keep; 0: all"),
        text_flag("--prompt", SAMPLE, "TEXT", o.prompt,
                  "the text to continue, or - for standard input; for a DIR with a tokenizer, or a model of bytes"),
        text_flag("--prompt-tokens", SAMPLE, "IDS", o.prompt_tokens,
                  "the same as token numbers: 15496,995; or - for standard input"),
        number_flag("--samples", SAMPLE, o.samples, 1, ANY_INT, "how many, from --seed on a seed each"),
        text_flag("--stop", SAMPLE, "TEXT", o.stop, "ends a sample where it would appear"),
        size_flag("--gpu-memory", PLAN, o.gpu_memory, "of the GPU to plan for (default: this device's)"),
        choice_flag("--precision", PLAN, o.precision, {"fp32", "bf16", "fp16"},
                    "of weights and activations; default: with --gpu-memory bf16, else this build's"),
        number_flag("--bandwidth", PLAN, o.bandwidth, 1e-3, 1e6,
                    "GB/s that each GPU sends: 450 by an H100's NVLink, 50 by 400 Gb/s InfiniBand"),
        number_flag("--flops", PLAN, o.flops, 1e-3, 1e6,
                    "TFLOP/s that each GPU sustains (default: 400 in 16 bits, 27 in FP32, 40 % of an H100's peak)"),
        switch_flag("--scan", PLAN, o.scan,
                    "instead: the layouts that fit, fastest first, for --gpus and the powers of two below"),
        switch_flag("--json", PLAN, o.as_json, "one JSON object instead of a table"),
    };
}

static void print_flag(const Flag& flag) {
    const json value = flag.value();
    std::string takes, by_default;
    if (!flag.is_switch) takes = format(" [%s]", flag.takes.c_str());
    if (!flag.is_switch && !value.is_null() && value != "") by_default = format(" (default %s)", value.dump().c_str());
    printf("  %-19s %s%s%s\n", flag.name, flag.help, takes.c_str(), by_default.c_str());
}

void print_help() {
    printf("usage: train_gpt [train] --data PATTERN [options]\n"
           "       train_gpt eval --from DIR [--data PATTERN] [--hellaswag FILE] [options]\n"
           "       train_gpt sample --from DIR [--prompt TEXT] [options]\n"
           "       train_gpt plan [options]\n");
    Options defaults;
    for (const auto& [name, subcommand] : SUBCOMMANDS) {
        printf("\n%s\n", name);
        for (const Flag& flag : flag_table(defaults)) {
            if (!(flag.subcommands & subcommand)) continue;
            if (subcommand != TRAIN && flag.subcommands & TRAIN) printf("  %s\n", flag.name);   // explained above
            else print_flag(flag);
        }
    }
}

Options parse_options(Subcommand subcommand, const char* name, const std::vector<std::string>& args) {
    Options options;
    const std::vector<Flag> flags = flag_table(options);
    for (size_t i = 0; i < args.size(); i++) {
        const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& f) { return args[i] == f.name; });
        if (flag == flags.end()) throw UserError("%s: no such flag; --help lists them", args[i].c_str());
        if (!(flag->subcommands & subcommand))
            throw UserError("%s is no flag of %s; --help lists them", flag->name, name);
        if (!flag->is_switch && i + 1 == args.size())
            throw UserError("%s takes %s, found nothing", flag->name, flag->takes.c_str());
        const std::string value = flag->is_switch ? "" : args[++i];
        if (!flag->parse(value))
            throw UserError("%s takes %s, found '%s'", flag->name, flag->takes.c_str(), value.c_str());
        options.given.insert(flag->name);
    }
    return options;
}

// All options of a subcommand, for the log.
json describe(Options options, Subcommand subcommand) {
    json all;
    for (const Flag& flag : flag_table(options))
        if (flag.subcommands & subcommand) all[flag.name + 2] = flag.value();
    return all;
}
