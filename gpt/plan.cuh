// From options to a run: checks the options against each other and the model, chooses the micro-batch, and predicts
// memory and time, which `plan`, the start of a run and its log show. Included by train_gpt.cu.
//
// Map: peak · model and setup · start of a run · a step in time · plan
#pragma once

// FLOPs of a step per token. Matmuls: 2 per weight forward, 4 backward. Attention: query t needs t + 1 keys, (T+1)/2 on
// average, in 2 products of 2 FLOPs per channel forward and twice that backward, the minimum for causal attention.
// Model FLOPs exclude recomputation, hardware FLOPs include it (Narayanan et al. 2021; PaLM, appendix B).
struct Flops { double model, hardware; };
void to_json(json& record, const Flops& flops) { record = {{"model", flops.model}, {"hardware", flops.hardware}}; }

Flops flops_per_token(const Setup& s) {
    const double layers = s.config.layers, C = s.config.channels, attention = 4 * C * (s.T + 1) / 2 * layers;
    const double matmul = 2.0 * count_parameters(s.config).matmul;
    Flops flops = {3 * (matmul + attention), 3 * (matmul + attention)};
    // Recomputed in all layers but the last: attention, if its probabilities were dropped, and with `full` also the
    // matmuls qkv, attproj and fc (12 - 4 = 8 C^2 weights).
    if (s.recompute == Recompute::FULL) flops.hardware += (layers - 1) * (2.0 * 8 * C * C + attention / layers);
    if (s.recompute == Recompute::SELECTIVE && s.attention == Attention::NAIVE)
        flops.hardware += (layers - 1) * attention / layers;
    return flops;
}

// The precision that `plan` assumes. Every other subcommand uses the build's.
DType precision_of(const Options& o) {
    return o.precision == PlanPrecision::OF_BUILD ? FLOATX : static_cast<DType>(o.precision);
}

// ---- peak ---------------------------------------------------------------------------------------
// The denominator of MFU: dense TFLOP/s of matmuls, from the vendors' data sheets (never the figures "with sparsity").
// The peak of other devices is measured.

struct Peak { const char* name; double half, fp32; };   // substring of the device's name; BF16, FP16; FP32 without TF32

const Peak PEAKS[] = {
    {"B200", 2250, 75},       {"GH200", 989.5, 66.9},   {"H200", 989.5, 66.9},     {"H100 PCIe", 756, 51.2},
    {"H100 NVL", 835, 60},    {"H100", 989.5, 66.9},    {"H800", 989.5, 66.9},     {"A100", 312, 19.5},
    {"A800", 312, 19.5},      {"L40S", 362, 91.6},      {"L40", 181, 90.5},        {"L4", 121, 30.3},
    {"A10G", 70, 31.5},       {"A10", 125, 31.2},       {"RTX 6000 Ada", 364, 91.1}, {"RTX A6000", 154.8, 38.7},
    {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71, 35.6},  {"Tesla T4", 65, 8.1},     {"V100", 125, 15.7},
};
constexpr double ASSUMED_TFLOPS_BF16 = 400, ASSUMED_TFLOPS_FP32 = 27;   // of `plan`: 40 % of an H100's peak

// Returns the FLOP/s of a square matmul: the best of the runs in a tenth of a second, at least three. The operands are
// random, because a GPU multiplies zeros faster.
double measure_peak() {
    const size_t n = device.is_cpu() ? 1024 : 8192;
    floatX* out;   // followed by the two operands
    check(cudaMalloc(&out, 3 * n * n * sizeof(floatX)), "cudaMalloc to measure the device's peak");
    floatX *a = out + n * n, *b = a + n * n;
    init_normal(a, 1, 0, 0, {}, 0, 2 * n * n);
    const MatmulShape square = {n, n, n, Op::AS_IS, Op::AS_IS, FLOATX, Into::ASSIGN, Epilogue::NONE};
    float best = INFINITY;   // milliseconds
    const double until = seconds_now() + 0.1;
    for (int run = 0; run < 3 || seconds_now() < until; run++)
        best = std::min(best, stream_milliseconds([&] { matmul({out, a, b, square}); }));
    check(cudaFree(out), "cudaFree");
    return 2.0 * n * n * n / (1e-3 * best);
}

// Sets device.peak_flops and its source.
void find_peak(const Options& o) {
    const Peak* peak = std::find_if(std::begin(PEAKS), std::end(PEAKS),
                                    [](const Peak& p) { return strstr(device.properties.name, p.name); });
    const bool listed = o.peak == PeakSource::TABLE && peak != std::end(PEAKS);
    device.peak_flops = !listed ? measure_peak() : 1e12 * (FLOATX == DType::FP32 ? peak->fp32 : peak->half);
    device.peak_source = listed ? format("data sheet of %s", peak->name) : "measured matmul";
}

// ---- model and setup ----------------------------------------------------------------------------

// A flag that sets a size of the model: its value on the command line (0 if it is not given), and the size it sets.
struct ModelSize { const char* flag; int option; int* model; };
std::array<ModelSize, 5> sizes(const Options& o, Config& c) {
    return {{{"--layers", o.layers, &c.layers}, {"--heads", o.heads, &c.heads}, {"--channels", o.channels, &c.channels},
             {"--context", o.context, &c.context}, {"--vocab", o.vocab, &c.vocab}}};
}

// Returns the sizes of --model, or of c without --model, replaced by the size flags that were given.
Config wanted_config(const Options& o, Config c) {
    const bool given = o.given.count("--model");
    if (given || c.layers == 0) {
        const auto preset = std::find_if(std::begin(PRESETS), std::end(PRESETS),
                                         [&](const Preset& p) { return o.model == p.name; });
        std::string names;
        for (const Preset& p : PRESETS) names += std::string(names.empty() ? "" : ", ") + p.name;
        if (preset == std::end(PRESETS))
            throw UserError("--model %s: unknown; expected one of %s", o.model.c_str(), names.c_str());
        const int vocab = c.vocab ? c.vocab : preset->config.vocab;
        c = preset->config;
        c.vocab = vocab;
    }
    for (const ModelSize& size : sizes(o, c))   // with --model, sizes recorded by a resumed run are ignored
        if (size.option && (!given || o.given.count(size.flag))) *size.model = size.option;
    return c;
}

Config config_from_options(const Options& o, int default_vocab) {
    const Config c = wanted_config(o, {0, 0, 0, 0, default_vocab});
    require_supported(c, "the model");
    return c;
}

// Returns the sizes of the model in a folder. Sizes on the command line must be equal to these.
Config config_of_folder(const Options& o, const std::string& dir) {
    Config found = read_config(dir + "/config.json"), wanted = wanted_config(o, found);
    const auto of_wanted = sizes(o, wanted), of_found = sizes(o, found);
    const char* loads = o.resume ? "--resume" : "--from";
    for (size_t i = 0; i < of_found.size(); i++)
        if (*of_wanted[i].model != *of_found[i].model)
            throw UserError("%s %d: the model in %s has %d, which %s keeps; leave out %s, or start a new model without "
                            "%s", of_found[i].flag, *of_wanted[i].model, dir.c_str(), *of_found[i].model, loads,
                            o.given.count("--model") ? "--model" : of_found[i].flag, loads);
    return found;
}

// Returns 95 % of the memory; the rest is left to libraries, other programs and fragmentation.
size_t without_margin(size_t memory) { return static_cast<size_t>(memory * 0.95); }

// Returns the number of micro-batches on each GPU that `batch`, the value of a flag in tokens, consists of.
long micro_batches_of(const char* flag, long batch, const Setup& s) {
    const long tokens = static_cast<long>(s.N()) * s.data(), below = batch / tokens * tokens;
    if (batch == below) return std::max(1L, batch / tokens);
    throw UserError("%s %ld: must be a multiple of micro-batch x sequence x GPUs%s = %d x %d x %d%s = %ld "
                    "tokens; nearest: %s%ld", flag, batch, s.tensor > 1 ? " / tensor-parallel" : "", s.B, s.T, s.gpus,
                    s.tensor > 1 ? format(" / %d", s.tensor).c_str() : "", tokens,
                    below ? format("%ld, ", below).c_str() : "", below + tokens);
}

// Returns the number of micro-batches that each GPU computes in a step, after --batch-ramp.
long accumulation_steps(const Options& o, const Setup& s) {
    return micro_batches_of("--total-batch", o.total_batch, s);
}

// Returns accumulation_steps() of the step after `tokens` tokens of training: with --batch-ramp, linear in `tokens`.
long micro_batches_after(uint64_t tokens, const Options& o, const Setup& s) {
    const long last = accumulation_steps(o, s), first = micro_batches_of("--batch-ramp", o.batch_ramp.from, s);
    if (tokens >= static_cast<uint64_t>(o.batch_ramp.tokens)) return last;
    if (first > last)
        throw UserError("--batch-ramp %ld: expected at most the %ld tokens of --total-batch", o.batch_ramp.from,
                        last * static_cast<long>(s.N()) * s.data());
    return first + static_cast<long>(static_cast<__int128>(last - first) * tokens / o.batch_ramp.tokens);
}

constexpr int FP8_ROWS = 16;   // cuBLASLt: the rows that FP8 weight gradients sum over are a multiple of this

// Returns the smallest micro-batch; others are multiples of it.
int least_micro_batch(const Setup& s) {
    return s.matmul == MatmulIn::FP8_ALL ? FP8_ROWS / std::gcd(FP8_ROWS, s.T) : 1;
}

// Returns the largest valid micro-batch up to `most` that divides each GPU's part of the total batch, or 0.
int valid_micro_batch(const Options& o, const Setup& s, int most) {
    const int least = least_micro_batch(s);
    const long batch = std::gcd(o.total_batch, o.batch_ramp.from), sequence = long{s.T} * s.data();
    int B = most / least * least;
    while (B > 0 && batch % (B * sequence) != 0) B -= least;
    return B;
}

// Returns the largest valid micro-batch that fits with a margin, or the smallest one if none fits.
int auto_micro_batch(const Options& o, Setup s, size_t memory) {
    s.B = 1;
    accumulation_steps(o, s);   // rejects a total batch that no micro-batch divides
    return std::max(least_micro_batch(s), valid_micro_batch(o, s, largest_micro_batch(s, without_margin(memory))));
}

// Requires what --matmul needs of the device.
void require_device(const Options& o) {
    if (o.matmul == MatmulIn::FLOATX) return;
    const cudaDeviceProp& p = device.properties;
    if (!device.is_cpu() && 10 * p.major + p.minor < 89)
        throw UserError("--matmul fp8: expected compute capability 8.9 (Ada) or later, found %d.%d of %s", p.major,
                        p.minor, p.name);
    if (cublasLtGetVersion() < first_cublaslt_with_fp8())
        throw UserError("--matmul fp8: %s needs %s or later, found %s; update the CUDA toolkit", p.name,
                        cublaslt_text(first_cublaslt_with_fp8()).c_str(), cublaslt_text(cublasLtGetVersion()).c_str());
}

void require_tensor_parallel(const Setup& s) {
    const int t = s.tensor, NH = s.config.heads;
    if (s.gpus % t != 0)
        throw UserError("--tensor-parallel %d: expected a divisor of the number of GPUs, found %d GPU%s", t, s.gpus,
                        s.gpus > 1 ? "s" : "");
    if (NH % t != 0) {
        std::string divisors = "1";
        for (int d = 2; d <= NH; d++)
            if (NH % d == 0) divisors += (d == NH ? " or " : ", ") + std::to_string(d);
        throw UserError("--tensor-parallel %d: expected a divisor of the heads: %d heads allow %s", t, NH,
                        divisors.c_str());
    }
    if (s.T % t != 0)
        throw UserError("--tensor-parallel %d: expected a divisor of the sequence, found --seq-len %d", t, s.T);
}

void require_consistent(const Options& o, const Setup& s) {
    if (s.T > s.config.context)
        throw UserError("--seq-len %d: expected at most the model's context of %d, which %s", s.T, s.config.context,
                        o.resume ? "--resume keeps" : !o.from.empty() ? "--from keeps"
                        : format("--context %d extends", s.T).c_str());
    if (s.N() >= MAX_ROWS)
        throw UserError("--micro-batch %d: expected at most %zu sequences of %d tokens", s.B, (MAX_ROWS - 1) / s.T,
                        s.T);
    if (s.grad_dtype != DType::FP32 && s.grad_dtype != s.precision) {
        const char* name = name_of(s.grad_dtype);
        throw UserError("--grad-dtype %s: expected weights in %s, found %s; make PRECISION=%s, or plan --precision %s",
                        name, name, name_of(s.precision), name, name);
    }
    if (s.matmul != MatmulIn::FLOATX && s.precision != DType::BF16)
        throw UserError("--matmul fp8: expected weights in bf16, found %s; make PRECISION=bf16, or plan --precision "
                        "bf16", name_of(s.precision));
    if (s.matmul == MatmulIn::FP8_ALL && s.N() % FP8_ROWS != 0)
        throw UserError("--matmul fp8-all: expected a micro-batch of a multiple of %d tokens, found %d x %d; --matmul "
                        "fp8 takes any number", FP8_ROWS, s.B, s.T);
    if (s.optimizer == Optimizer::MUON && (s.tensor > 1 || s.zero > 1 || s.master_weights == MasterWeights::NONE))
        throw UserError("--optimizer muon: expected --zero 0 or 1, --tensor-parallel 1 and --master-weights fp32");
    if (s.zero > last_stage(s))
        throw UserError("--zero 3: expected 0, 1 or 2 with --matmul fp8, which keeps all weights in FP8 on each GPU");
    const bool no_master = s.master_weights == MasterWeights::NONE;
    if (no_master && s.precision == DType::FP32)
        throw UserError("--master-weights none: expected weights in 16 bits, found fp32, which are their own master "
                        "weights; make PRECISION=bf16, or plan --precision bf16");
    if (no_master && s.gpus > 1) throw UserError("--master-weights none: expected one GPU, found %d", s.gpus);
    if (o.batch_ramp.tokens) micro_batches_after(0, o, s);   // rejects an invalid ramp
    if (o.noise_every > 0 && (s.zero > 1 || s.tensor > 1))
        throw UserError("--noise-every %ld: needs whole gradients on each GPU; expected --zero 0 or 1 and no "
                        "--tensor-parallel, found --zero %d --tensor-parallel %d", o.noise_every, s.zero, s.tensor);
    if (o.noise_every > 0 && s.gpus == 1 && accumulation_steps(o, s) == 1)
        throw UserError("--noise-every %ld: needs at least two micro-batches in a step, or two GPUs; expected "
                        "--total-batch %zu or more, or a smaller --micro-batch", o.noise_every, 2 * s.N());
}

// Returns the number of rows that the head processes at a time in training. On a GPU that holds the logits of all rows
// without recomputation and ZeRO, these are all rows. The number changes the order of sums. So it depends on the size
// of the GPU's memory, but not on what is free of it, nor on --recompute and --zero, which do not change the bits.
size_t training_head_rows(Setup s, size_t gpu_memory) {
    s.head_rows = s.rows();
    s.recompute = Recompute::NONE;
    s.zero = 0;
    s.gpus = s.tensor;
    return s.on_gpu && plan(s).total <= without_margin(gpu_memory) ? s.rows() : HEAD_ROWS;
}

// Says if a resumed run has other rows than training_head_rows() returned before, on another GPU for example.
void print_head_rows(const Setup& s, const Start& start) {
    if (!start.trainer.contains("head_rows")) return;
    const size_t before = whole_number<size_t>(start.trainer, "head_rows", start.dir + "/trainer.json");
    if (before != s.logits_rows())
        printf("resume     the head processed %zu rows at a time, now %zu: equal up to rounding\n", before,
               s.logits_rows());
}

// Returns the setup of a run. --micro-batch auto uses memory.available.
Setup make_setup(const Options& o, const Config& c, Purpose purpose, const Memory& memory) {
    const size_t head_rows = purpose == Purpose::SAMPLING ? 1 : HEAD_ROWS;
    Setup s = {c, o.micro_batch, o.seq_len ? o.seq_len : c.context, o.recompute, o.grad_dtype, purpose, head_rows,
               o.attention, precision_of(o), !device.is_cpu() || o.gpu_memory > 0,   // --gpu-memory: of plan
               o.matmul, o.fp8_scaling, o.fp8_accumulation, o.master_weights, o.optimizer};
    s.gpus = world.alone() ? std::max(1, o.gpus) : static_cast<int>(world.size);
    s.tensor = o.tensor_parallel;
    require_tensor_parallel(s);
    s.zero = s.gpus > 1 && purpose == Purpose::TRAINING ? o.zero : 0;
    s.rank = world.rank;
    if (o.micro_batch == AUTO) s.B = auto_micro_batch(o, s, memory.available);
    require_consistent(o, s);
    if (purpose == Purpose::TRAINING) s.head_rows = training_head_rows(s, memory.all);
    return s;
}

bool use_graphs(const Options& o) {
    if (o.graph == UseGraph::ON && !world.alone())
        throw UserError("--graph on: CUDA graphs work on one GPU only; expected auto or off, found %zu GPUs",
                        world.size);
    return o.graph == UseGraph::ON || (o.graph == UseGraph::AUTO && !device.is_cpu() && world.alone());
}

// ---- start of a run -----------------------------------------------------------------------------

const char* recompute_name(const Setup& s) { return RECOMPUTE_NAMES[static_cast<int>(s.recompute)].first; }
const char* attention_name(const Setup& s) { return s.attention == Attention::FLASH ? "flash" : "naive"; }

std::string model_text(const Config& c) {
    return format("%d layers, %d heads, %d channels, context %d, vocab %d", c.layers, c.heads, c.channels, c.context,
                  c.vocab);
}

json model_record(Config c) {
    json record;
    for (const ModelSize& size : sizes({}, c)) record[size.flag + 2] = *size.model;
    return record;
}

std::string matmul_text(const Setup& s) {
    const char* name = MATMUL_NAMES[static_cast<int>(s.matmul)];
    if (s.matmul == MatmulIn::FLOATX) return name;
    return format("%s, scaling %s%s", name, FP8_SCALING_NAMES[static_cast<int>(s.fp8_scaling)],
                  s.fp8_accumulation == Fp8Accumulation::FAST ? ", fast accumulation" : "");
}

std::string attention_text(const Setup& s) {
    if (s.attention == Attention::NAIVE) return "naive";
    if (!on_tensor_cores(s.config.head_size())) return "flash, without tensor cores";
    return format("flash, on tensor cores (%s)", name_of(device.tensor_cores));
}

// Prints a row of a table of memory: `bytes`, also in percent of `all`.
void print_bytes(const std::string& name, size_t bytes, double all, const std::string& more = "") {
    printf("  %-14s %16s  %5.1f %%%s\n", name.c_str(), size_text(bytes).c_str(), 100 * bytes / all, more.c_str());
}

// Prints the plan by category; memory: the size of the device that percentages refer to.
void print_categories(const Plan& p, size_t memory) {
    for (size_t i = 0; i < std::size(CATEGORY_NAMES); i++)
        if (p.bytes[i]) print_bytes(CATEGORY_NAMES[i], p.bytes[i], memory);
}

// Returns the plan in one line: the total, and its parts in the same unit.
std::string memory_text(const Plan& p, size_t memory, Optimizer optimizer) {
    auto sum = [&](auto... categories) { return (p.bytes[static_cast<int>(categories)] + ...); };
    const std::pair<const char*, size_t> parts[] = {
        {"weights", sum(Category::WEIGHTS)}, {"gradients", sum(Category::GRADIENTS)},
        {optimizer == Optimizer::MUON ? "Muon" : "AdamW", sum(Category::MASTER, Category::ADAM_M, Category::ADAM_V)},
        {"activations", sum(Category::ACTIVATIONS)},
        {"other", sum(Category::BUFFERS, Category::WORKSPACE, Category::CUDA)}};
    std::string text;
    for (const auto& [name, bytes] : parts)
        text += format("%s %s %.1f", text.empty() ? ":" : ",", name, bytes / (p.total < 1e9 ? 1e6 : 1e9));
    return format("%s of %.*f GB", size_text(p.total).c_str(), memory < 10e9, memory / 1e9) + text;
}

// Returns a step's tokens as text, such as "524,288 tokens = 8 micro-batches of 64 x 1024".
std::string step_text(const Setup& s, long accumulation) {
    const char* plural = s.data() > 1 ? "s" : "";
    const std::string gpus = s.tensor > 1 ? format("%d group%s of %d GPUs x ", s.data(), plural, s.tensor)
                             : s.gpus > 1 ? format("%d GPUs x ", s.gpus) : "";
    return format("%s tokens = %s%ld micro-batch%s of %d x %d", grouped(accumulation * long(s.N()) * s.data()).c_str(),
                  gpus.c_str(), accumulation, accumulation > 1 ? "es" : "", s.B, s.T);
}

// Prints five lines and, with --verbose, the details.
void print_run(const Setup& s, const Options& o, const TrainData& data, long accumulation, const Start& start) {
    const bool many = s.gpus > 1;
    printf("device     %s%s, %s, peak %.4g TFLOP/s%s (%s)\n", many ? format("%d x ", s.gpus).c_str() : "",
           device.properties.name, name_of(FLOATX), device.peak_flops / 1e12, many ? " each" : "",
           device.peak_source.c_str());
    printf("model      %s: %s parameters, %s\n", model_text(s.config).c_str(),
           short_number(count_parameters(s.config).real).c_str(),
           start.dir.empty() ? "random init" : ("from " + start.dir).c_str());
    printf("data       %s: %s training tokens, %s validation tokens\n", o.data.c_str(),
           grouped(data.train.count()).c_str(), grouped(data.val.count()).c_str());
    const std::string resumed = start.step > 0 ? format(" from step %s on", grouped(start.step + 1).c_str()) : "";
    const std::string matmul = s.matmul == MatmulIn::FLOATX ? "" : ", matmul " + matmul_text(s);
    const std::string tensor = s.tensor > 1 ? format(", tensor parallel %d", s.tensor) : "";
    const std::string zero = many ? format(", ZeRO %d", s.zero) + tensor : "";
    const std::string ramp = o.batch_ramp.tokens == 0 ? "" : format(", grows from %s in %s tokens",
        grouped(o.batch_ramp.from).c_str(), grouped(o.batch_ramp.tokens).c_str());
    const std::string length = o.minutes > 0 ? format("%g minutes", o.minutes) :
        o.tokens > 0 ? grouped(o.tokens) + " tokens" : grouped(o.steps) + " steps";
    printf("step       %s%s; %s%s, recompute %s%s%s%s\n", step_text(s, accumulation).c_str(), ramp.c_str(),
           length.c_str(), resumed.c_str(), recompute_name(s), matmul.c_str(), zero.c_str(),
           o.out.empty() ? "; not saved without --out" : "");
    printf("memory     %s\n", memory_text(plan(s), memory_now().all, s.optimizer).c_str());
    const double step = double(accumulation) * s.N() * s.data();
    const bool unknown = o.minutes > 0 || (o.tokens > 0 && o.batch_ramp.tokens > 0);
    const double steps = unknown ? INFINITY : o.tokens > 0 ? ceil(double(o.tokens) / step) : o.steps;
    if (o.warmup > steps)
        printf("note       --warmup %g is longer than the run of %.0f steps, which does not reach --lr\n", o.warmup,
               steps);
    if (o.min_lr > o.lr && o.schedule != Schedule::CONSTANT)
        printf("note       --min-lr %g is above --lr %g: the learning rate rises after warm-up\n", o.min_lr, o.lr);
    if (o.verbose) {
        print_categories(plan(s), memory_now().all);
        const size_t text_bytes = data.train.text_bytes() + data.val.text_bytes();
        if (text_bytes)
            printf("text       %s bytes, encoded by the tokenizer in %s\n", grouped(text_bytes).c_str(),
                   start.dir.c_str());
        printf("attention  %s\nmatmul     %s\n", attention_text(s).c_str(), matmul_text(s).c_str());
        if (const LossScale scale = start_loss_scale(o, start); scale.interval > 0 || scale.scale != NO_SCALE)
            printf("loss scale %.0f%s\n", scale.scale, scale.interval > 0 ? " at first, dynamic" : "");
        printf("output     %s\n", o.out.empty() ? "none: --out DIR saves a log and checkpoints" : o.out.c_str());
    }
    fflush(stdout);
}

// Returns the log's first object.
json run_record(const Options& o, const Setup& s) {
    int runtime = 0, driver = 0;
    cudaRuntimeGetVersion(&runtime);
    cudaDriverGetVersion(&driver);
    json model = model_record(s.config);
    model["parameters"] = count_parameters(s.config).real;
    return {{"run",
             {{"options", describe(o, TRAIN)}, {"model", model}, {"device", device.properties.name},
              {"precision", name_of(FLOATX)}, {"attention", attention_text(s)}, {"matmul", matmul_text(s)},
              {"peak_flops", device.peak_flops}, {"peak_source", device.peak_source},
              {"flops_per_token", flops_per_token(s)}, {"gpus", s.gpus},
              {"tensor_parallel", s.tensor}, {"zero", s.zero}, {"head_rows", s.logits_rows()},
              {"planned_bytes", plan(s).total}, {"cuda_runtime", runtime}, {"cuda_driver", driver},
              {"nccl", nccl_version()}, {"cublaslt", cublasLtGetVersion()}}}};
}

// ---- a step in time -----------------------------------------------------------------------------
// Simulates the overlap of computation and communication in the order of CommunicationSchedule (distributed.cuh), which
// training also uses. Communication begins when all computation before it is done and the link is free. Computation
// waits for the weights that it needs and for the gradient buffers that it fills. gather() and start_sum() of tensor
// parallelism use a link of their own, in the order of forward_block() and backward_block().
//
// assumed  FLOPs run at one sustained rate, independent of micro-batch and communication. Bytes are sent at one
//          bandwidth on each link, that of a ring's slowest part, without latency; the links do not slow each other
//          down. Tensor groups are on one machine. Layers of ZeRO and group 0 use the data link, even if all GPUs are
//          one tensor group. GPUs never wait for each other.
// omitted  the update, data loading, FLOPs that flops_per_token() does not count, communication of norm and losses

// Times in seconds. Bytes: sent by one GPU of R in a ring all-gather or reduce-scatter, (R - 1) / R of the data. The
// defaults are those without tensor parallelism.
struct StepWork {
    size_t layers;
    int zero;
    double forward, again, head;       // in a micro-batch: forward of a layer, its recomputation; the head (both ways)
    double weights[2], gradients[2];   // bytes of one all-gather, reduce-scatter: of group 0, of a layer
    double bandwidth;                  // bytes a second
    double rows = 0, tensor_bandwidth = 1;     // bytes of one gather or sum of rows, and bytes a second
    int rows_again = 0;                        // the number of these in a layer's recomputation
    double mlp = 0, fcw = 0, qkvw = 0;         // in a layer's backward: the MLP; each product of fcw and of qkvw
};

// bytes: of the data link. waiting: for the tensor link.
struct StepTime { double seconds = 0, computing = 0, bytes = 0, tensor_bytes = 0, waiting = 0; };

StepWork step_work(const Setup& s, double flops, double bandwidth, double tensor_bandwidth) {
    const Layout y = layout_of(s);
    const Flops per_token = flops_per_token(s);
    const double C = s.config.channels, head = 6 * C * s.config.vocab;   // forward and backward
    const double layer = (per_token.model - head) / 3 / y.layers;
    const double again = y.layers > 1 ? (per_token.hardware - per_token.model) / (y.layers - 1) : 0;
    auto seconds = [&](double of_token) { return of_token * s.rows() / flops; };
    auto sent = [&](size_t g, DType dtype) {
        return double(y.group(g)) * (y.ranks(g) - 1) / y.ranks(g) * size_of(dtype);
    };
    const double rows = s.rows() * C * (s.tensor - 1) * size_of(s.precision);
    const double square = 2 * C * C;   // of a matmul with (C,C) weights
    return {y.layers, s.zero, seconds(layer), seconds(again), seconds(head),
            {sent(0, s.precision), sent(1, s.precision)}, {sent(0, s.grad_dtype), sent(1, s.grad_dtype)}, bandwidth,
            rows, tensor_bandwidth, s.recompute == Recompute::FULL ? 3 : 0,
            seconds(2 * 8 * square), seconds(4 * square), seconds(3 * square)};
}

class Timeline : public CommunicationSchedule {
public:
    explicit Timeline(const StepWork& work)
        : CommunicationSchedule(work.zero, work.layers), w_(work), gathered_(1 + weight_slots_),
          reduced_(1 + grad_slots_) {}

    StepTime run(long micro_batches) {
        for (long i = 1; i <= micro_batches; i++)
            micro_step(i < micro_batches ? MicroBatch::ONE_OF_SEVERAL : MicroBatch::LAST);
        for (double sent : reduced_) now_ = std::max(now_, sent);
        return {now_, computing_, bytes_, tensor_bytes_, waiting_};
    }

private:
    void micro_step(MicroBatch which) {
        need_weights(0, 1);
        for (size_t l = 0; l < layers_; l++) {
            need_weights(1 + l, 2 + l);
            exchange_rows(4);
            compute(w_.forward);
        }
        begin_gradients(0);
        compute(w_.head);
        for (size_t l = layers_; l-- > 0;) {
            need_weights(1 + l, l);
            begin_gradients(1 + l);
            const bool recomputes = l + 1 < layers_;
            if (w_.rows > 0) backward_in_group(recomputes);
            else compute((recomputes ? w_.again : 0) + 2 * w_.forward);
            send_gradients(1 + l, which);
        }
        send_gradients(0, which);
    }
    // Recomputes and computes a layer's backward: the MLP, then attention. Each ends with two products that take
    // equally long, `product`: of fcw, then of qkvw, for the gradients of the layer's input and of the weight.
    void backward_in_group(bool recomputes) {
        if (recomputes) exchange_rows(w_.rows_again);
        compute(recomputes ? w_.again : 0);
        const std::pair<double, double> halves[] = {{w_.mlp, w_.fcw}, {2 * w_.forward - w_.mlp, w_.qkvw}};
        for (const auto& [seconds, product] : halves) {
            exchange_rows(1);   // gathers dres
            compute(seconds - 2 * product);
            for (int i = 0; i < 2; i++) {
                send_rows(1);   // gathers ln2 or ln1, then sums dln
                compute(product);
                await_rows();
            }
        }
    }
    void send_rows(int times) {
        tensor_link_ = std::max(tensor_link_, now_) + times * w_.rows / w_.tensor_bandwidth;
        tensor_bytes_ += times * w_.rows;
    }
    void await_rows() {
        waiting_ += std::max(0.0, tensor_link_ - now_);
        now_ = std::max(now_, tensor_link_);
    }
    void exchange_rows(int times) {   // that computation waits for
        if (w_.rows == 0) return;
        send_rows(times);
        await_rows();
    }
    void compute(double seconds) {
        now_ += seconds;
        computing_ += seconds;
    }
    void send(double& sent, double bytes) {
        link_ = sent = std::max(link_, now_) + bytes / w_.bandwidth;
        bytes_ += bytes;
    }
    void gather(size_t g, size_t slot) override { send(gathered_[slot], w_.weights[g > 0]); }
    void await_weights(size_t slot) override { now_ = std::max(now_, gathered_[slot]); }
    void begin(size_t, size_t slot) override { now_ = std::max(now_, reduced_[slot]); }
    void reduce(size_t g, size_t slot) override { send(reduced_[slot], (zero_ == 0 ? 2 : 1) * w_.gradients[g > 0]); }

    const StepWork& w_;
    double now_ = 0, link_ = 0, tensor_link_ = 0;   // when GPU and links become idle
    double computing_ = 0, bytes_ = 0, tensor_bytes_ = 0, waiting_ = 0;
    std::vector<double> gathered_, reduced_;   // by slot: when its last communication ends
};

double flops_of(const Options& o) {
    return 1e12 * (o.flops > 0 ? o.flops : precision_of(o) == DType::FP32 ? ASSUMED_TFLOPS_FP32 : ASSUMED_TFLOPS_BF16);
}

// ---- plan ---------------------------------------------------------------------------------------

// Returns the bytes of weights, gradients, master weights and moments on one GPU, which ZeRO shards.
size_t state_bytes(const Plan& p) {
    return std::accumulate(p.bytes, p.bytes + static_cast<int>(Category::ADAM_V) + 1, size_t{0});
}

// Returns a layout's memory on each GPU, the bytes each GPU sends in a step and, with --bandwidth, the time of a step.
json layout_record(const Options& o, const Setup& s, size_t memory) {
    const Plan p = plan(s);
    const long accumulation = accumulation_steps(o, s);
    const double bandwidth = o.bandwidth > 0 ? o.bandwidth * 1e9 : INFINITY;
    const double tensor_bandwidth = o.tensor_bandwidth * 1e9;
    const StepTime time = Timeline(step_work(s, flops_of(o), bandwidth, tensor_bandwidth)).run(accumulation);
    json bytes = bytes_record(p), step;
    bytes["total"] = p.total;
    if (o.bandwidth > 0)
        step = {{"seconds", time.seconds}, {"computing", time.computing}, {"sending", time.bytes / bandwidth},
                {"tensor_sending", time.tensor_bytes / tensor_bandwidth},
                {"exposed", time.seconds - time.computing},   // communication that computation waits for
                {"tensor_exposed", time.waiting},
                {"tokens_per_s", double(s.N()) * s.data() * accumulation / time.seconds}};
    return {{"gpus", s.gpus}, {"tensor_parallel", s.tensor}, {"zero", s.zero}, {"micro_batch", s.B},
            {"accumulation", accumulation}, {"recompute", recompute_name(s)}, {"head_rows", s.logits_rows()},
            {"bytes", bytes}, {"state", state_bytes(p)},
            {"bytes_per_parameter", double(state_bytes(p)) / layout_of(s.config, s.gpus).elements()},
            {"fits", p.total <= memory},
            {"bytes_sent", time.bytes + time.tensor_bytes}, {"tensor_bytes_sent", time.tensor_bytes}, {"step", step}};
}

// plan --scan: returns, for --gpus and each power of two below, the layouts that fit with a margin, fastest first. A
// layout is a size of tensor groups, a stage of ZeRO and a recomputation mode with the largest micro-batch;
// --tensor-parallel, --zero, --recompute and --micro-batch stay fixed if given. Tensor groups have at most 8 GPUs,
// those of one machine. Layouts whose times differ by rounding only are sorted by recomputation, then by bytes sent.
json scan_records(const Options& o, Setup s, size_t memory) {
    const size_t usable = without_margin(memory);
    const int most = s.gpus;
    std::vector<std::array<int, 2>> grids;   // GPUs, and GPUs in a tensor group
    std::vector<int> tensors = {1, 2, 4, 8};
    if (o.given.count("--tensor-parallel") || s.optimizer == Optimizer::MUON) tensors = {o.tensor_parallel};
    for (int below = 1; below < 2 * most; below *= 2)
        for (const int t : tensors)
            if (std::min(below, most) % t == 0 && s.config.heads % t == 0 && s.T % t == 0)
                grids.push_back({std::min(below, most), t});
    std::multimap<std::tuple<int, long long, int, double>, json> sorted;
    for (const auto& [gpus, tensor] : grids) {
        s.gpus = gpus;
        s.tensor = tensor;
        for (s.zero = 0; s.zero <= (gpus > 1 ? last_stage(s) : 0); s.zero++)
            for (const auto& [name, mode] : RECOMPUTE_NAMES) {
                s.recompute = mode;
                s.head_rows = HEAD_ROWS;
                if (o.given.count("--zero") && gpus > 1 && s.zero != o.zero) continue;
                if (o.given.count("--recompute") && mode != o.recompute) continue;
                if (o.micro_batch == AUTO) s.B = valid_micro_batch(o, s, largest_micro_batch(s, usable));
                if (s.B == 0 || o.total_batch % (long(s.N()) * s.data()) != 0) continue;
                s.head_rows = training_head_rows(s, memory);
                if (plan(s).total > usable) continue;
                const json record = layout_record(o, s, memory);
                const double time = std::log(double(record["step"]["seconds"])), sent = record["bytes_sent"];
                sorted.emplace(std::tuple{gpus, std::llround(1e6 * time), int(mode), sent}, record);
            }
    }
    json all = json::array();
    for (const auto& [order, record] : sorted) all.push_back(record);
    return all;
}

// Returns the bytes of activations that a layer keeps from forward to backward.
size_t kept_bytes_per_layer(Setup s) {
    s.config.layers = 2;   // so that exactly the tensors that each layer keeps have two copies
    size_t kept = 0;
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s))
        if (row.category == Category::ACTIVATIONS && row.copies == 2) kept += row.copy_bytes();
    return kept;
}

json tensor_records(const Setup& s) {
    json tensors;
    auto add = [&](const auto& row, Category category, const char* dtype, size_t bytes) {
        tensors.push_back({{"name", row.name}, {"category", CATEGORY_NAMES[static_cast<int>(category)]},
                           {"shape", row.shape}, {"copies", row.copies}, {"dtype", dtype}, {"bytes", bytes}});
    };
    for (const ParameterRow& row : parameter_table(s))
        add(row, Category::WEIGHTS, name_of(s.precision), row.elements * row.copies * size_of(s.precision));
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s)) add(row, row.category, row.dtype, row.bytes());
    return tensors;
}

// Returns the plan as one JSON object. memory: bytes of the device.
json plan_record(const Options& o, const Setup& s, size_t memory) {
    json record = layout_record(o, s, memory), most;
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        Setup other = s;
        other.recompute = mode;
        other.head_rows = HEAD_ROWS;
        most[name] = largest_micro_batch(other, memory);
    }
    record.update({{"model", model_record(s.config)}, {"parameters", count_parameters(s.config).real},
                   {"seq_len", s.T}, {"precision", name_of(s.precision)}, {"grad_dtype", name_of(s.grad_dtype)},
                   {"attention", attention_name(s)}, {"matmul", MATMUL_NAMES[static_cast<int>(s.matmul)]},
                   {"activation_bytes_per_token_per_layer", double(kept_bytes_per_layer(s)) / s.N()},
                   {"gpu_memory", memory}, {"max_micro_batch", most}, {"flops_per_token", flops_per_token(s)},
                   {"flops_per_s", flops_of(o)}, {"tensors", tensor_records(s)}});
    if (o.scan) record["scan"] = scan_records(o, s, memory);
    return record;
}

// Prints rows for the fastest layouts of each number of GPUs; -> marks the first.
void print_layouts(const json& layouts) {
    constexpr int MOST = 12;
    printf("\n    GPUs  tensor  ZeRO  micro-batch  accumulated  recompute      state    buffers      total   step ms"
           "  exposed    tok/s\n");
    int gpus = 0, printed = 0;
    for (const json& c : layouts) {
        printed = c["gpus"] == gpus ? printed + 1 : 1;
        if (printed > MOST) continue;
        const std::string recompute = c["recompute"];
        const json &bytes = c["bytes"], &step = c["step"];
        printf("%s %5d  %6d  %4d  %11d  %11ld  %-9s  %9s  %9s  %9s  %8.1f  %5.1f %%  %7s\n",
               c["gpus"] == gpus ? "  " : "->", int(c["gpus"]), int(c["tensor_parallel"]), int(c["zero"]),
               int(c["micro_batch"]), long(c["accumulation"]), recompute.c_str(), size_text(c["state"]).c_str(),
               size_text(bytes["buffers"]).c_str(), size_text(bytes["total"]).c_str(), 1e3 * double(step["seconds"]),
               100 * double(step["exposed"]) / double(step["seconds"]), short_number(step["tokens_per_s"]).c_str());
        gpus = c["gpus"];
    }
    if (layouts.empty()) printf("  none fits\n");
}

// Prints the command that trains with a layout: its values, and the flags on the command line that training has too.
void print_train_command(Options o, const Setup& s, const json& layout) {
    std::map<std::string, json> values = {{"--micro-batch", layout["micro_batch"]},
                                          {"--recompute", layout["recompute"]}};
    if (o.from.empty()) values["--model"] = o.model;
    if (s.gpus > 1) {
        values["--gpus"] = layout["gpus"];
        values["--zero"] = layout["zero"];
    }
    if (layout["tensor_parallel"] > 1) values["--tensor-parallel"] = layout["tensor_parallel"];
    std::string command = s.precision == FLOATX ? "" : format("make PRECISION=%s && ", name_of(s.precision));
    command += shell_word(program_invocation_name);
    for (const Flag& flag : flag_table(o)) {
        if (!(flag.subcommands & TRAIN) || (!values.count(flag.name) && !o.given.count(flag.name))) continue;
        const json value = values.count(flag.name) ? values[flag.name] : flag.value();
        const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
        command += format(" %s %s", flag.name, shell_word(text).c_str());
    }
    printf("\ntrain      %s --data PATTERN\n", command.c_str());
}

void print_plan(const Options& o, const Setup& s, const json& record, size_t memory) {
    printf("model      %s: %s parameters\n", model_text(s.config).c_str(),
           grouped(count_parameters(s.config).real).c_str());
    printf("step       %s\n", step_text(s, record["accumulation"]).c_str());
    printf("formats    %s, gradients %s, recompute %s, attention %s, matmul %s\n", name_of(s.precision),
           name_of(s.grad_dtype), recompute_name(s), attention_name(s), MATMUL_NAMES[static_cast<int>(s.matmul)]);
    if (s.gpus > 1 && !o.scan) {
        const std::string tensor = s.tensor == 1 ? "" : format(", %s of it in its tensor group",
                                                               size_text(double(record["tensor_bytes_sent"])).c_str());
        printf("sent       %s a step by each GPU%s\n", size_text(double(record["bytes_sent"])).c_str(), tensor.c_str());
    }
    if (o.bandwidth > 0) {
        const bool groups = s.tensor > 1 || (o.scan && s.gpus > 1);
        printf("times      estimates for GPUs that compute %g TFLOP/s%s and send %g GB/s%s\n", flops_of(o) / 1e12,
               o.flops > 0 ? "" : " (assumed; --flops)", o.bandwidth,
               groups ? format(", in a tensor group %g GB/s", o.tensor_bandwidth).c_str() : "");
        print_layouts(o.scan ? record["scan"] : json::array({record}));
    }
    if (o.scan) {   // the fastest layout of the largest number of GPUs
        const json& all = record["scan"];
        const auto best = std::find_if(all.begin(), all.end(), [&](const json& c) {
            return c["gpus"] == all.back()["gpus"]; });
        if (best != all.end()) print_train_command(o, s, *best);
        return;
    }
    printf("memory     %s of %s\n", size_text(plan(s).total).c_str(), size_text(memory).c_str());
    print_categories(plan(s), memory);
    printf("  %s; %.2f bytes of state per parameter\n", record["fits"] ? "fits" : "does not fit on one such GPU",
           double(record["bytes_per_parameter"]));
    const size_t activations = record["bytes"]["activations"];
    printf("\nactivations of half a percent or more; a layer keeps %.0f bytes per token\n",
           double(record["activation_bytes_per_token_per_layer"]));
    for (const json& tensor : record["tensors"]) {
        const size_t bytes = tensor["bytes"];
        if (tensor["category"] != "activations" || bytes < activations / 200) continue;
        const std::string copies = tensor["copies"] > 1 ? format(" x %d", int(tensor["copies"])) : "";
        print_bytes(tensor["name"], bytes, activations, "  " + shape_text(tensor["shape"]) + copies);
    }
    const Flops flops = flops_per_token(s);
    printf("\nFLOPs per token: %.4g model, %.4g hardware\nlargest micro-batch that fits%s\n", flops.model,
           flops.hardware, o.total_batch ? " and divides the batch" : "");
    json layout = record["fits"] ? record : json();   // otherwise the first mode below that fits
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        const int B = valid_micro_batch(o, s, record["max_micro_batch"][name]);
        printf("  --recompute %-9s  --micro-batch %d\n", name, B);
        if (layout.is_null() && B > 0)
            layout = {{"micro_batch", B}, {"recompute", name}, {"gpus", s.gpus}, {"zero", s.zero},
                      {"tensor_parallel", s.tensor}};
    }
    if (!layout.is_null()) print_train_command(o, s, layout);
}

void plan_subcommand(Options o) {
    const bool elsewhere = o.gpu_memory > 0;
    if (!elsewhere && !no_device().empty()) throw UserError("plan needs --gpu-memory SIZE: %s", no_device().c_str());
    if (elsewhere && o.precision == PlanPrecision::OF_BUILD) o.precision = PlanPrecision::BF16;   // as on a GPU
    if (o.gpus == ALL_GPUS) throw UserError("--gpus all: expected a number with plan");
    if (o.scan && (o.total_batch == 0 || o.bandwidth == 0))
        throw UserError("plan --scan needs --total-batch TOKENS and --bandwidth GB/s");
    if (o.scan && !o.given.count("--micro-batch")) o.micro_batch = AUTO;
    const size_t memory = elsewhere ? static_cast<size_t>(o.gpu_memory) : memory_now().all;
    const Config config = o.from.empty() ? config_from_options(o, 0) : config_of_folder(o, o.from);
    const Setup setup = make_setup(o, config, Purpose::TRAINING, {memory, memory});
    const json record = plan_record(o, setup, memory);
    if (o.as_json) printf("%s\n", json_text(record, 2).c_str());
    else print_plan(o, setup, record, memory);
}
