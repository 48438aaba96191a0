// From options to a run: checks them against each other and the model, chooses the micro-batch, predicts memory and
// time. `plan` prints this, and so does a run at its start and in its log. Included by train_gpt.cu.
//
// Map: peak · model and setup · start of a run · a step in time · plan
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <vector>

// ---- peak ---------------------------------------------------------------------------------------
// The denominator of MFU: dense TFLOP/s of matmuls, from the makers' data sheets (never the figures "with sparsity").
// Other devices are measured.

struct Peak { const char* name; double half, fp32; };   // part of the device's name; BF16, FP16; FP32 without TF32

const Peak PEAKS[] = {
    {"B200", 2250, 75},       {"GH200", 989.5, 66.9},   {"H200", 989.5, 66.9},     {"H100 PCIe", 756, 51.2},
    {"H100 NVL", 835, 60},    {"H100", 989.5, 66.9},    {"H800", 989.5, 66.9},     {"A100", 312, 19.5},
    {"A800", 312, 19.5},      {"L40S", 362, 91.6},      {"L40", 181, 90.5},        {"L4", 121, 30.3},
    {"A10G", 70, 31.5},       {"A10", 125, 31.2},       {"RTX 6000 Ada", 364, 91.1}, {"RTX A6000", 154.8, 38.7},
    {"RTX 4090", 165.2, 82.6}, {"RTX 3090", 71, 35.6},  {"Tesla T4", 65, 8.1},     {"V100", 125, 15.7},
};
constexpr double ASSUMED_TFLOPS_BF16 = 400, ASSUMED_TFLOPS_FP32 = 27;   // of `plan`: 40 % of an H100's peak

// Returns the FLOP/s of a square matmul: the best of the runs in a tenth of a second, at least three. The factors are
// random, as a GPU multiplies zeros faster.
double measure_peak() {
    const size_t n = device.is_cpu() ? 1024 : 8192;
    floatX* out;   // followed by the two factors
    check(cudaMalloc(&out, 3 * n * n * sizeof(floatX)), "cudaMalloc to measure the device's peak");
    floatX *a = out + n * n, *b = a + n * n;
    init_normal(a, 1, 0, 0, 2 * n * n);
    const MatmulShape square = {n, n, n, Op::AS_IS, Op::AS_IS, FLOATX, Into::ASSIGN, Epilogue::NONE};
    float best = INFINITY;   // milliseconds
    const double until = seconds_now() + 0.1;
    for (int run = 0; run < 3 || seconds_now() < until; run++)
        best = std::min(best, stream_milliseconds([&] { matmul({out, a, b, square}); }));
    check(cudaFree(out), "cudaFree");
    return 2.0 * n * n * n / (1e-3 * best);
}

void find_peak(const Options& o) {
    const Peak* peak = o.peak == PeakSource::TABLE ? std::begin(PEAKS) : std::end(PEAKS);
    while (peak != std::end(PEAKS) && !strstr(device.properties.name, peak->name)) peak++;
    const bool listed = peak != std::end(PEAKS);
    device.peak_flops = !listed ? measure_peak() : 1e12 * (FLOATX == DType::FP32 ? peak->fp32 : peak->half);
    device.peak_source = listed ? format("data sheet of %s", peak->name) : "measured matmul";
}

// ---- model and setup ----------------------------------------------------------------------------

// The flags that set a model's sizes: the value on the command line (0: none), and the model's.
struct ModelSize { const char* flag; int option; int* model; };
std::array<ModelSize, 5> sizes(const Options& o, Config& c) {
    return {{{"--layers", o.layers, &c.layers}, {"--heads", o.heads, &c.heads}, {"--channels", o.channels, &c.channels},
             {"--context", o.context, &c.context}, {"--vocab", o.vocab, &c.vocab}}};
}

// The model that --model and the flags of sizes ask for, otherwise c.
Config wanted_config(const Options& o, Config c) {
    const bool given = o.given.count("--model");
    if (given || c.layers == 0) {
        const auto preset = std::find_if(std::begin(PRESETS), std::end(PRESETS),
                                         [&](const Preset& p) { return o.model == p.name; });
        std::string names;
        for (const Preset& p : PRESETS) names += std::string(names.empty() ? "" : ", ") + p.name;
        if (preset == std::end(PRESETS))
            throw UserError("--model takes one of %s, found '%s'", names.c_str(), o.model.c_str());
        const int vocab = c.vocab ? c.vocab : preset->config.vocab;
        c = preset->config;
        c.vocab = vocab;
    }
    for (const ModelSize& size : sizes(o, c))   // with --model a resumed run's sizes do not count
        if (size.option && (!given || o.given.count(size.flag))) *size.model = size.option;
    return c;
}

Config config_from_options(const Options& o, int default_vocab) {
    const Config c = wanted_config(o, {0, 0, 0, 0, default_vocab});
    require_supported(c, "the model");
    return c;
}

// The model in a folder. Sizes on the command line must be the same.
Config config_of_folder(const Options& o, const std::string& dir) {
    Config found = read_config(dir + "/config.json"), wanted = wanted_config(o, found);
    const auto of_wanted = sizes(o, wanted), of_found = sizes(o, found);
    for (size_t i = 0; i < of_found.size(); i++)
        if (*of_wanted[i].model != *of_found[i].model)
            throw UserError("%s %d, but the model in %s has %d: its sizes are those of %s", of_found[i].flag,
                            *of_wanted[i].model, dir.c_str(), *of_found[i].model,
                            o.resume ? "the run that --resume continues" : "--from");
    return found;
}

// Leaves a twentieth to libraries, other programs and fragmentation.
size_t without_margin(size_t memory) { return static_cast<size_t>(memory * 0.95); }

// Micro-batches of a step that each GPU takes.
long accumulation_steps(const Options& o, const Setup& s) {
    const long tokens = static_cast<long>(s.N()) * s.gpus, below = o.total_batch / tokens * tokens;
    if (o.total_batch == below) return std::max(1L, o.total_batch / tokens);
    throw UserError("--total-batch %ld is no multiple of micro-batch x sequence x GPUs = %d x %d x %d = %ld tokens; "
                    "nearest that are: %s%ld", o.total_batch, s.B, s.T, s.gpus, tokens,
                    below ? format("%ld and ", below).c_str() : "", below + tokens);
}

// The largest divisor of n up to `most`; 0 if most is.
long largest_divisor(long n, long most) {
    long divisor = std::min(n, most);
    while (divisor > 0 && n % divisor != 0) divisor--;
    return divisor;
}

// The largest micro-batch that fits, with a margin, and divides each GPU's part of the total batch; 1 if none does.
int auto_micro_batch(const Options& o, Setup s, size_t memory) {
    s.B = 1;
    const long sequences = accumulation_steps(o, s);
    const int B = std::max(1, largest_micro_batch(s, without_margin(memory)));
    return o.total_batch ? largest_divisor(sequences, B) : B;
}

constexpr size_t FP8_ROWS = 16;   // cuBLASLt: each size of a product in FP8 is a multiple of this

void require_fp8_device() {
    const cudaDeviceProp& p = device.properties;
    if (!device.is_cpu() && 10 * p.major + p.minor < 89)
        throw UserError("--matmul fp8 needs compute capability 8.9 (Ada, Hopper): %s has %d.%d", p.name, p.major,
                        p.minor);
}

void require_consistent(const Setup& s) {
    const int context = s.config.context;
    if (s.T > context)
        throw UserError("--seq-len %d is more than the model's context of %d; --context %d makes a model of that many "
                        "positions", s.T, context, s.T);
    if (s.N() >= MAX_ROWS)
        throw UserError("--micro-batch %d of %d tokens each: more than %zu tokens", s.B, s.T, MAX_ROWS);
    if (s.grad_dtype != DType::FP32 && s.grad_dtype != s.precision) {
        const char* name = name_of(s.grad_dtype);
        throw UserError("--grad-dtype %s needs weights in %s: a build with PRECISION=%s, or plan --precision %s", name,
                        name, name, name);
    }
    const bool fp8 = s.matmul != MatmulIn::FLOATX;
    if (fp8 && s.precision != DType::BF16)
        throw UserError("--matmul fp8 is for a model in bf16: a build with PRECISION=bf16, or plan --precision bf16; "
                        "found %s", name_of(s.precision));
    if (fp8 && s.N() % FP8_ROWS != 0)
        throw UserError("--matmul fp8 needs a multiple of %zu tokens in a micro-batch, found %d x %d", FP8_ROWS, s.B,
                        s.T);
    if (s.zero > last_stage(s))
        throw UserError("--zero 3 and --matmul fp8: each GPU has all weights in FP8; expected --zero 0, 1 or 2");
    if (s.master_weights == MasterWeights::FP32) return;
    if (s.precision == DType::FP32)
        throw UserError("--master-weights none: weights in fp32 are their own master copy; expected weights in 16 "
                        "bits: a build with PRECISION=bf16 or fp16, or plan --precision bf16");
    if (s.gpus > 1) throw UserError("--master-weights none is for one GPU");
}

// `memory` is what --micro-batch auto may use.
Setup make_setup(const Options& o, const Config& c, Purpose purpose, size_t memory) {
    const size_t head_rows = purpose == Purpose::SAMPLING ? 1 : HEAD_ROWS;
    Setup s = {c, o.micro_batch, o.seq_len ? o.seq_len : c.context, o.recompute, o.grad_dtype, purpose, head_rows,
               o.attention, precision_of(o)};
    s.master_weights = o.master_weights;
    s.gpus = world.alone() ? std::max(1, o.gpus) : static_cast<int>(world.size);
    s.zero = s.gpus > 1 && purpose == Purpose::TRAINING ? o.zero : 0;
    s.rank = world.rank;
    s.matmul = o.matmul;
    s.fp8_scaling = o.fp8_scaling;
    if (o.micro_batch == AUTO) s.B = auto_micro_batch(o, s, memory);
    require_consistent(s);
    return s;
}

bool use_graphs(const Options& o) {
    if (o.graph == UseGraph::ON && !world.alone())
        throw UserError("--graph on: a micro-step of many GPUs is no graph; expected auto or off");
    return o.graph == UseGraph::ON || (o.graph == UseGraph::AUTO && !device.is_cpu() && world.alone());
}

// ---- start of a run -----------------------------------------------------------------------------

const char* recompute_name(const Setup& s) { return RECOMPUTE_NAMES[static_cast<int>(s.recompute)].first; }
const char* attention_name(const Setup& s) { return s.attention == Attention::FLASH ? "flash" : "naive"; }

std::string model_text(const Config& c) {
    return format("%d layers, %d heads, %d channels, context %d, vocabulary %d: %zu parameters", c.layers, c.heads,
                  c.channels, c.context, c.vocab, count_parameters(c).real);
}

json model_record(Config c) {
    json record;
    for (const ModelSize& size : sizes({}, c)) record[size.flag + 2] = *size.model;
    return record;
}

json flops_record(const Setup& s) {
    const Flops flops = flops_per_token(s);
    return {{"model", flops.model}, {"hardware", flops.hardware}};
}

std::string matmul_text(const Setup& s) {
    const char* name = MATMUL_NAMES[static_cast<int>(s.matmul)];
    if (s.matmul == MatmulIn::FLOATX) return name;
    return format("%s, scales %s", name, FP8_SCALING_NAMES[static_cast<int>(s.fp8_scaling)]);
}

std::string attention_text(const Setup& s) {
    if (s.attention == Attention::NAIVE) return "naive";
    if (!on_tensor_cores(s.config.head_size())) return "flash, without tensor cores";
    return format("flash, on tensor cores (%s)", name_of(device.tensor_cores));
}

// A line of a table of memory: what takes `bytes`, of `all`.
void print_bytes(const std::string& name, size_t bytes, double all, const std::string& more = "") {
    printf("  %-14s %16s  %5.1f %%%s\n", name.c_str(), size_text(bytes).c_str(), 100 * bytes / all, more.c_str());
}

// The plan by category, of the memory that must hold it.
void print_memory(const Plan& p, size_t memory) {
    printf("memory     %s of %s\n", size_text(p.total).c_str(), size_text(memory).c_str());
    for (size_t i = 0; i < std::size(CATEGORY_NAMES); i++)
        if (p.bytes[i]) print_bytes(CATEGORY_NAMES[i], p.bytes[i], memory);
}

void print_run(const Setup& s, const Options& o, const TrainData& data, long accumulation, const Start& start) {
    printf("device     %s, %s, %.2f TFLOP/s peak (%s)\n", device.properties.name, name_of(FLOATX),
           device.peak_flops / 1e12, device.peak_source.c_str());
    printf("model      %s, %s\n", model_text(s.config).c_str(),
           start.dir.empty() ? "initialised at random" : ("from " + start.dir).c_str());
    const size_t text_bytes = data.train.text_bytes() + data.val.text_bytes();
    const std::string made = format(", made of %zu bytes by the tokenizer in %s", text_bytes, start.dir.c_str());
    printf("data       %s: %zu tokens to train on, %zu to validate on%s\n", o.data.c_str(), data.train.count(),
           data.val.count(), text_bytes ? made.c_str() : "");
    const std::string gpus = s.gpus > 1 ? format(" x %d GPUs", s.gpus) : "";
    printf("step       %d x %d tokens x %ld micro-batches%s = %ld tokens\n", s.B, s.T, accumulation, gpus.c_str(),
           accumulation * long(s.N()) * s.gpus);
    printf("attention  %s\n", attention_text(s).c_str());
    if (s.matmul != MatmulIn::FLOATX) printf("matmul     %s\n", matmul_text(s).c_str());
    const LossScale scale = start_loss_scale(o, start);
    if (scale.interval > 0 || scale.scale != NO_SCALE)
        printf("loss scale %.0f%s\n", scale.scale, scale.interval > 0 ? " at first, dynamic" : "");
    print_memory(plan(s), memory_now().all);
    printf("output     %s\n", o.out.empty() ? "none: --out DIR saves a log and checkpoints" : o.out.c_str());
    fflush(stdout);
}

// The log's first object.
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
              {"flops_per_token", flops_record(s)}, {"gpus", s.gpus}, {"zero", s.zero},
              {"planned_bytes", plan(s).total}, {"cuda_runtime", runtime}, {"cuda_driver", driver},
              {"nccl", nccl_version()}, {"cublaslt", cublasLtGetVersion()}}}};
}

// ---- a step in time -----------------------------------------------------------------------------
// Simulates the overlap of computation and communication, in the program's own order: CommunicationSchedule in
// distributed.cuh. Communication begins when all computation before it is done and the link is free. Computation waits
// for the weights that it needs and for the gradient buffers that it fills.
//
// assumed  FLOPs take time at one sustained rate, independent of micro-batch and communication. Bytes take time at one
//          bandwidth, that of a ring's slowest link, without latency. GPUs never wait for each other.
// left out the update, loading data, all other FLOPs than flops_per_token(), and the communication of norm and losses

// All times in seconds, bytes as one GPU sends them in a ring: (R - 1) / R of what there is.
struct StepWork {
    size_t layers;
    int zero;
    double forward, again, head;       // of a micro-batch: a layer's forward, what backward does again of it; the head
    double weights[2], gradients[2];   // bytes of one all-gather or reduce-scatter: of group 0, of a layer
    double bandwidth;                  // bytes a second
};

struct StepTime { double seconds = 0, computing = 0, bytes = 0; };

StepWork step_work(const Setup& s, double flops, double bandwidth) {
    const Layout y = layout_of(s);
    const Flops per_token = flops_per_token(s);
    const double head = 6.0 * s.config.vocab * s.config.channels;   // forward and backward
    const double layer = (per_token.model - head) / 3 / y.layers;
    const double again = y.layers > 1 ? (per_token.hardware - per_token.model) / (y.layers - 1) : 0;
    auto seconds = [&](double of_token) { return of_token * s.N() / flops; };
    auto sent = [&](size_t g, DType dtype) { return double(y.shard(g)) * (y.gpus - 1) * size_of(dtype); };
    return {y.layers, s.zero, seconds(layer), seconds(again), seconds(head),
            {sent(0, s.precision), sent(1, s.precision)}, {sent(0, s.grad_dtype), sent(1, s.grad_dtype)}, bandwidth};
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
        return {now_, computing_, bytes_};
    }

private:
    void micro_step(MicroBatch which) {
        need_weights(0, 1);
        for (size_t l = 0; l < layers_; l++) {
            need_weights(1 + l, 2 + l);
            compute(w_.forward);
        }
        begin_gradients(0);
        compute(w_.head);
        begin_gradients(layers_);
        for (size_t l = layers_; l-- > 0;) {
            need_weights(1 + l, l);
            if (l > 0) begin_gradients(l);
            compute((l + 1 < layers_ ? w_.again : 0) + 2 * w_.forward);
            send_gradients(1 + l, which);
        }
        send_gradients(0, which);
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
    double now_ = 0, link_ = 0;   // until when GPU and link have something to do
    double computing_ = 0, bytes_ = 0;
    std::vector<double> gathered_, reduced_;   // by slot: when
};

double flops_of(const Options& o) {
    return 1e12 * (o.flops > 0 ? o.flops : precision_of(o) == DType::FP32 ? ASSUMED_TFLOPS_FP32 : ASSUMED_TFLOPS_BF16);
}

// ---- plan ---------------------------------------------------------------------------------------

// Weights, gradients, master weights and moments, of one GPU: ZeRO shards these.
size_t state_bytes(const Plan& p) {
    size_t bytes = 0;
    for (int category = 0; category <= static_cast<int>(Category::ADAM_V); category++) bytes += p.bytes[category];
    return bytes;
}

// What a layout needs of each GPU: bytes, and what it sends and, with --bandwidth, computes in a step.
json layout_record(const Options& o, const Setup& s, size_t memory) {
    const Plan p = plan(s);
    const long accumulation = accumulation_steps(o, s);
    const double bandwidth = o.bandwidth > 0 ? o.bandwidth * 1e9 : INFINITY;
    const StepTime time = Timeline(step_work(s, flops_of(o), bandwidth)).run(accumulation);
    json bytes = bytes_record(p), step;
    bytes["total"] = p.total;
    if (o.bandwidth > 0)
        step = {{"seconds", time.seconds}, {"computing", time.computing}, {"sending", time.bytes / bandwidth},
                {"exposed", time.seconds - time.computing},   // what computation waits for
                {"tokens_per_s", double(s.N()) * s.gpus * accumulation / time.seconds}};
    return {{"gpus", s.gpus}, {"zero", s.zero}, {"micro_batch", s.B}, {"accumulation", accumulation},
            {"recompute", recompute_name(s)}, {"bytes", bytes}, {"state", state_bytes(p)},
            {"bytes_per_parameter", double(state_bytes(p)) / layout_of(s).elements()}, {"fits", p.total <= memory},
            {"bytes_sent", time.bytes}, {"step", step}};
}

// plan --scan: for --gpus and each power of two below, the layouts that fit with a margin, fastest first: stages of
// ZeRO, recomputation modes, with the largest micro-batch. --zero, --recompute and --micro-batch are kept if given. Of
// layouts whose times differ by rounding only, those that recompute less come first, then those that send less.
json scan_records(const Options& o, Setup s, size_t memory) {
    auto excluded = [&](const char* flag, bool differs) { return o.given.count(flag) && differs; };
    const bool largest = o.micro_batch == AUTO;
    const int most = s.gpus;
    json all = json::array();
    for (int below = 1; below < 2 * most; below *= 2) {
        s.gpus = std::min(below, most);
        std::multimap<std::tuple<long long, int, double>, json> sorted;
        for (s.zero = 0; s.zero <= (s.gpus > 1 ? last_stage(s) : 0); s.zero++)
            for (const auto& [name, mode] : RECOMPUTE_NAMES) {
                s.recompute = mode;
                s.B = largest ? 1 : o.micro_batch;
                if (excluded("--zero", s.gpus > 1 && s.zero != o.zero) || excluded("--recompute", mode != o.recompute))
                    continue;
                if (o.total_batch % (long(s.N()) * s.gpus) != 0) continue;
                if (largest) s.B = auto_micro_batch(o, s, memory);
                if (plan(s).total > without_margin(memory)) continue;
                const json record = layout_record(o, s, memory);
                const double time = std::log(double(record["step"]["seconds"])), sent = record["bytes_sent"];
                sorted.emplace(std::tuple{std::llround(1e6 * time), int(mode), sent}, record);
            }
        for (const auto& [order, record] : sorted) all.push_back(record);
    }
    return all;
}

// What a layer keeps of its activations from forward to backward.
size_t kept_bytes_per_layer(Setup s) {
    s.config.layers = 2;   // then what is kept for each layer, and only that, has two copies
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
    for (const ParameterRow& row : parameter_table(s.config))
        add(row, Category::WEIGHTS, name_of(s.precision), row.elements * row.copies * size_of(s.precision));
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s)) add(row, row.category, row.dtype, row.bytes());
    return tensors;
}

// The plan as one object; memory: what must hold it.
json plan_record(const Options& o, const Setup& s, size_t memory) {
    json record = layout_record(o, s, memory), most;
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        Setup other = s;
        other.recompute = mode;
        most[name] = largest_micro_batch(other, memory);
    }
    record.update({{"model", model_record(s.config)}, {"parameters", count_parameters(s.config).real},
                   {"seq_len", s.T}, {"precision", name_of(s.precision)}, {"grad_dtype", name_of(s.grad_dtype)},
                   {"attention", attention_name(s)}, {"matmul", MATMUL_NAMES[static_cast<int>(s.matmul)]},
                   {"activation_bytes_per_token_per_layer", double(kept_bytes_per_layer(s)) / s.N()},
                   {"gpu_memory", memory}, {"max_micro_batch", most}, {"flops_per_token", flops_record(s)},
                   {"flops_per_s", flops_of(o)}, {"tensors", tensor_records(s)}});
    if (o.scan) record["scan"] = scan_records(o, s, memory);
    return record;
}

// A line for each layout; -> marks the first, which is the fastest, of a number of GPUs.
void print_layouts(const json& layouts) {
    printf("\n    GPUs  ZeRO  micro-batch  accumulated  recompute       state     buffers       total    step ms"
           "  exposed      tok/s\n");
    int gpus = 0;
    for (const json& c : layouts) {
        const std::string recompute = c["recompute"];
        const json &bytes = c["bytes"], &step = c["step"];
        printf("%s %5d  %4d  %11d  %11ld  %-9s  %10s  %10s  %10s  %9.1f  %5.1f %%  %9s\n",
               c["gpus"] == gpus ? "  " : "->", int(c["gpus"]), int(c["zero"]), int(c["micro_batch"]),
               long(c["accumulation"]), recompute.c_str(), size_text(c["state"]).c_str(),
               size_text(bytes["buffers"]).c_str(), size_text(bytes["total"]).c_str(), 1e3 * double(step["seconds"]),
               100 * double(step["exposed"]) / double(step["seconds"]), short_number(step["tokens_per_s"]).c_str());
        gpus = c["gpus"];
    }
    if (layouts.empty()) printf("  none fits\n");
}

void print_plan(const Options& o, const Setup& s, const json& record, size_t memory) {
    const std::string matmul = record["matmul"];
    printf("model      %s\n", model_text(s.config).c_str());
    printf("a step     %d x %d tokens, accumulated %ld times by each GPU; %s, gradients %s, recompute %s, "
           "attention %s, matmul %s\n", s.B, s.T, long(record["accumulation"]), name_of(s.precision),
           name_of(s.grad_dtype), recompute_name(s), attention_name(s), matmul.c_str());
    if (s.gpus > 1 && !o.scan) printf("each sends %s a step\n", size_text(double(record["bytes_sent"])).c_str());
    if (o.bandwidth > 0) {
        printf("times      estimates for GPUs that compute %g TFLOP/s%s and send %g GB/s\n", flops_of(o) / 1e12,
               o.flops > 0 ? "" : " (assumed; --flops)", o.bandwidth);
        print_layouts(o.scan ? record["scan"] : json::array({record}));
    }
    if (o.scan) return;
    print_memory(plan(s), memory);
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
    const std::string total = o.total_batch ? format(" --total-batch %ld", o.total_batch) : "",
        gpus = s.gpus > 1 ? format(" --gpus %d --zero %d", s.gpus, s.zero) : "";
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        const long most = record["max_micro_batch"][name];
        const long B = o.total_batch ? largest_divisor(o.total_batch / (long{s.T} * s.gpus), most) : most;
        printf("  --recompute %-9s  --micro-batch %ld%s%s\n", name, B, total.c_str(), gpus.c_str());
    }
}

void plan_subcommand(Options o) {
    const bool elsewhere = o.gpu_memory > 0;
    const std::string problem = elsewhere ? "" : no_device();
    if (!problem.empty()) throw UserError("plan needs --gpu-memory SIZE here: %s", problem.c_str());
    if (elsewhere && o.precision == PlanPrecision::OF_BUILD) o.precision = PlanPrecision::BF16;   // as a card does
    if (o.gpus == ALL_GPUS) throw UserError("--gpus all: plan needs a number");
    if (o.scan && (o.total_batch == 0 || o.bandwidth == 0))
        throw UserError("plan --scan needs --total-batch TOKENS and --bandwidth GB/s");
    if (o.scan && !o.given.count("--micro-batch")) o.micro_batch = AUTO;
    const size_t memory = elsewhere ? static_cast<size_t>(o.gpu_memory) : memory_now().all;
    const Config config = o.from.empty() ? config_from_options(o, 0) : config_of_folder(o, o.from);
    Setup setup = make_setup(o, config, Purpose::TRAINING, memory);
    setup.on_gpu |= elsewhere;
    const json record = plan_record(o, setup, memory);
    if (o.as_json) printf("%s\n", json_text(record, 2).c_str());
    else print_plan(o, setup, record, memory);
}
