// From options to a run: checks them against each other and the model, chooses the micro-batch, predicts memory and
// time. `plan` prints this, and so does a run at its start and in its log. Included by train_gpt.cu.
//
// Map: peak · model and setup · start of a run · a step in time · plan --scan · plan
#pragma once

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// ---- peak ---------------------------------------------------------------------------------------
// The denominator of MFU: dense TFLOP/s of matmuls, from the makers' data sheets (never the figures "with sparsity").
// Other devices are measured. `plan --json` prints this table.

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

Config config_of_preset(const std::string& name) {
    std::string names;
    for (const Preset& preset : PRESETS) {
        if (name == preset.name) return preset.config;
        names += std::string(names.empty() ? "" : ", ") + preset.name;
    }
    throw UserError("--model takes one of %s, found '%s'", names.c_str(), name.c_str());
}

Config config_from_options(const Options& o, int default_vocab) {
    Config c = config_of_preset(o.model);
    if (default_vocab) c.vocab = default_vocab;
    for (const ModelSize& size : sizes(o, c))
        if (size.option) *size.model = size.option;
    require_supported(c, "the model");
    return c;
}

// The model in a folder. Sizes on the command line must be the same.
Config config_of_folder(const Options& o, const std::string& dir) {
    Config c = read_config(dir + "/config.json"), wanted = o.given.count("--model") ? config_of_preset(o.model) : c;
    wanted.vocab = c.vocab;
    const auto of_wanted = sizes(o, wanted), of_folder = sizes(o, c);
    for (size_t i = 0; i < of_folder.size(); i++) {
        const auto& [flag, option, in_folder] = of_folder[i];
        const bool given = o.given.count(flag);
        const int value = given ? option : *of_wanted[i].model;
        if (value != *in_folder)
            throw UserError("%s%s %d, but the model in %s has %s %d: its sizes are those of %s",
                            given ? "" : format("--model %s has ", o.model.c_str()).c_str(), flag, value, dir.c_str(),
                            flag, *in_folder, o.resume ? "the run that --resume continues" : "--from");
    }
    return c;
}

// Leaves a twentieth to libraries, other programs and fragmentation.
size_t without_margin(size_t memory) { return static_cast<size_t>(memory * 0.95); }

// The largest divisor of n up to `most`; 0 if most is.
long largest_divisor(long n, long most) {
    long divisor = std::min(n, most);
    while (divisor > 0 && n % divisor != 0) divisor--;
    return divisor;
}

// The largest micro-batch that fits, with a margin, and divides each GPU's part of the total batch.
int auto_micro_batch(Setup s, size_t memory, long total_batch) {
    s.B = 1;
    const long together = long{s.T} * s.gpus;
    if (total_batch % together != 0)
        throw UserError("--total-batch %ld is no multiple of --seq-len %d%s", total_batch, s.T,
                        s.gpus > 1 ? format(" x %d GPUs", s.gpus).c_str() : "");
    const int B = std::max(1, largest_micro_batch(s, without_margin(memory)));   // 1: the allocation will fail
    return total_batch ? largest_divisor(total_batch / together, B) : B;
}

constexpr size_t FP8_ROWS = 16;   // cuBLASLt: each size of a product in FP8 is a multiple of this

void require_fp8(const Setup& s) {
    if (s.precision != DType::BF16)
        throw UserError("--matmul fp8 is for a model in bf16: a build with PRECISION=bf16, or plan --precision bf16; "
                        "found %s", name_of(s.precision));
    if (s.N() % FP8_ROWS != 0)
        throw UserError("--matmul fp8 needs a multiple of %zu tokens in a micro-batch, found %d x %d", FP8_ROWS, s.B,
                        s.T);
    if (s.zero > last_stage(s))
        throw UserError("--zero 3 and --matmul fp8: each GPU has all weights in FP8; expected --zero 0, 1 or 2");
}

void require_fp8_device() {
    const cudaDeviceProp& p = device.properties;
    if (!device.is_cpu() && 10 * p.major + p.minor < 89)
        throw UserError("--matmul fp8 needs compute capability 8.9 (Ada, Hopper): %s has %d.%d", p.name, p.major,
                        p.minor);
}

void require_consistent(const Options& o, const Config& c) {
    if (o.seq_len > c.context)
        throw UserError("--seq-len %d is more than the model's context of %d; --context %d makes a model of that many "
                        "positions", o.seq_len, c.context, o.seq_len);
    if (o.grad_dtype != DType::FP32 && o.grad_dtype != precision_of(o)) {
        const char* name = name_of(o.grad_dtype);
        throw UserError("--grad-dtype %s needs weights in %s: a build with PRECISION=%s, or plan --precision %s", name,
                        name, name, name);
    }
    if (o.master_weights == MasterWeights::FP32) return;
    if (precision_of(o) == DType::FP32)
        throw UserError("--master-weights none: weights in fp32 are their own master copy; expected weights in 16 "
                        "bits: a build with PRECISION=bf16 or fp16, or plan --precision bf16");
    if (!world.alone() || o.gpus != std::vector<int>{1}) throw UserError("--master-weights none is for one GPU");
}

// `memory` is what --micro-batch auto may use.
Setup make_setup(const Options& o, const Config& c, Purpose purpose, size_t memory) {
    require_consistent(o, c);
    const int T = o.seq_len ? o.seq_len : c.context;
    const size_t head_rows = purpose == Purpose::SAMPLING ? 1 : HEAD_ROWS;
    Setup s = {c, o.micro_batch, T, o.recompute, o.grad_dtype, purpose, head_rows, o.attention, precision_of(o)};
    s.master_weights = o.master_weights;
    s.gpus = world.alone() ? std::max(1, o.gpus.front()) : static_cast<int>(world.size);
    s.zero = s.gpus > 1 && purpose == Purpose::TRAINING ? o.zero : 0;
    s.rank = world.rank;
    s.matmul = o.matmul;
    s.fp8_scaling = o.fp8_scaling;
    if (o.micro_batch == AUTO) s.B = auto_micro_batch(s, memory, o.total_batch);
    if (s.N() >= MAX_ROWS)
        throw UserError("--micro-batch %d of %d tokens each: more than %zu tokens", s.B, T, MAX_ROWS);
    if (s.matmul != MatmulIn::FLOATX) require_fp8(s);
    return s;
}

bool use_graphs(const Options& o) {
    if (o.graph == UseGraph::ON && !world.alone())
        throw UserError("--graph on: a micro-step of many GPUs is no graph; expected auto or off");
    return o.graph == UseGraph::ON || (o.graph == UseGraph::AUTO && !device.is_cpu() && world.alone());
}

// Micro-batches of a step that each GPU takes.
long accumulation_steps(const Options& o, const Setup& s) {
    const long tokens = static_cast<long>(s.N()) * s.gpus, below = o.total_batch / tokens * tokens;
    if (o.total_batch == below) return std::max(1L, o.total_batch / tokens);
    const bool many = s.gpus > 1;
    throw UserError("--total-batch %ld is no multiple of micro-batch x sequence%s = %d x %d%s = %ld tokens; nearest "
                    "that are: %s%ld", o.total_batch, many ? " x GPUs" : "", s.B, s.T,
                    many ? format(" x %d", s.gpus).c_str() : "", tokens,
                    below ? format("%ld and ", below).c_str() : "", below + tokens);
}

// ---- start of a run -----------------------------------------------------------------------------

const char* recompute_name(const Setup& s) { return RECOMPUTE_NAMES[static_cast<int>(s.recompute)].first; }
const char* attention_name(const Setup& s) { return s.attention == Attention::FLASH ? "flash" : "naive"; }

std::string model_text(const Config& c) {
    return format("%d layers, %d heads, %d channels, context %d, vocabulary %d", c.layers, c.heads, c.channels,
                  c.context, c.vocab);
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

// The plan by category, with bars against the memory that must hold it.
void print_memory(const Plan& p, size_t memory) {
    printf("memory     %s of %s\n", size_text(p.total).c_str(), size_text(memory).c_str());
    for (size_t i = 0; i < std::size(CATEGORY_NAMES); i++)
        if (p.bytes[i])
            printf("  %-11s %10s  %s\n", CATEGORY_NAMES[i], size_text(p.bytes[i]).c_str(),
                   bar(double(p.bytes[i]) / memory).c_str());
}

void print_run(const Setup& s, const Options& o, const TrainData& data, long accumulation, const Start& start) {
    const Config& c = s.config;
    const std::string from = start.dir.empty() ? "initialised at random" : "from " + start.dir;
    printf("device     %s, %s, %.2f TFLOP/s peak (%s)\n", device.properties.name, name_of(FLOATX),
           device.peak_flops / 1e12, device.peak_source.c_str());
    if (device.is_cpu()) printf("%s", busy_text().c_str());
    printf("model      %s: %zu parameters, %s\n", model_text(c).c_str(), count_parameters(c).real, from.c_str());
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
              {"nccl", nccl_version()},
              {"cublaslt", cublasLtGetVersion()}}}};
}

// ---- a step in time -----------------------------------------------------------------------------
// Simulates computation, communication and their overlap. Two resources work at the same time, each on one thing after
// the other: the GPU, which computes, and its link, which sends. The order is the program's own: CommunicationSchedule
// in distributed.cuh. Communication begins when all computation before it is done and the link is free. Computation
// waits for the weights that it needs and for the gradient buffers that it fills. So layer l's gradients overlap with
// the backward of the layers below it, layer l + 1's weights with the forward or backward of its neighbour, and group 0
// is exposed twice: its gradients at the end of the last micro-batch, its weights (ZeRO 1 and up) at the beginning of
// the next step.
//
// assumed  FLOPs take time at one sustained rate, independent of micro-batch and communication (on a GPU a small
//          micro-batch is slower, and NCCL occupies some multiprocessors). Bytes take time at one bandwidth, that of a
//          ring's slowest link, without latency. GPUs never wait for each other.
// left out the update, loading data, all other FLOPs than flops_per_token(), and the communication of norm and losses

// All times in seconds, bytes as one GPU sends them in a ring: (R - 1) / R of what there is.
struct StepWork {
    size_t layers;
    int zero;
    double forward, again, head;       // of a micro-batch: a layer's forward, what backward does again of it; the head
    double weights[2], gradients[2];   // bytes of one all-gather or reduce-scatter: of group 0, of a layer
    double bandwidth;                  // bytes a second
};

struct StepTime {
    double seconds = 0, computing = 0, sending = 0, bytes = 0;
    // What computation waits for; while it does, the link is busy.
    double exposed() const { return seconds - computing; }
    double hidden() const { return std::max(0.0, sending - exposed()); }
};

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
    StepTime end() {
        for (double sent : reduced_) now_ = std::max(now_, sent);
        sums_.seconds = now_;
        return sums_;
    }

private:
    void compute(double seconds) {
        now_ += seconds;
        sums_.computing += seconds;
    }
    void send(double& sent, double bytes) {
        link_ = sent = std::max(link_, now_) + bytes / w_.bandwidth;
        sums_.sending += bytes / w_.bandwidth;
        sums_.bytes += bytes;
    }
    void gather(size_t g, size_t slot) override { send(gathered_[slot], w_.weights[g > 0]); }
    void await_weights(size_t slot) override { now_ = std::max(now_, gathered_[slot]); }
    void begin(size_t, size_t slot) override { now_ = std::max(now_, reduced_[slot]); }
    void reduce(size_t g, size_t slot) override { send(reduced_[slot], (zero_ == 0 ? 2 : 1) * w_.gradients[g > 0]); }

    const StepWork& w_;
    double now_ = 0, link_ = 0;   // until when GPU and link have something to do
    StepTime sums_;
    std::vector<double> gathered_, reduced_;   // by slot: when
};

StepTime simulate(const StepWork& w, long micro_batches) {
    Timeline t(w);
    for (long i = 1; i <= micro_batches; i++)
        t.micro_step(i < micro_batches ? MicroBatch::ONE_OF_SEVERAL : MicroBatch::LAST);
    return t.end();
}

// When the head begins nothing is on its way, in no stage: from one head to the next it always takes as long.
StepTime step_time(const StepWork& w, long micro_batches) {
    constexpr long ENOUGH = 2;
    if (micro_batches <= ENOUGH) return simulate(w, micro_batches);
    const StepTime most = simulate(w, ENOUGH), fewer = simulate(w, ENOUGH - 1);
    auto go_on = [&](double last, double before) { return last + (micro_batches - ENOUGH) * (last - before); };
    return {go_on(most.seconds, fewer.seconds), go_on(most.computing, fewer.computing),
            go_on(most.sending, fewer.sending), go_on(most.bytes, fewer.bytes)};
}

double flops_of(const Options& o) {
    return 1e12 * (o.flops > 0 ? o.flops : precision_of(o) == DType::FP32 ? ASSUMED_TFLOPS_FP32 : ASSUMED_TFLOPS_BF16);
}

// Without --bandwidth what is sent takes no time.
StepTime step_time(const Options& o, const Setup& s, long micro_batches) {
    return step_time(step_work(s, flops_of(o), o.bandwidth > 0 ? o.bandwidth * 1e9 : INFINITY), micro_batches);
}

json time_record(const StepTime& t, double tokens) {
    return {{"seconds", t.seconds}, {"computing", t.computing}, {"sending", t.sending}, {"hidden", t.hidden()},
            {"exposed", t.exposed()}, {"tokens_per_s", tokens / t.seconds}};
}

// ---- plan --scan --------------------------------------------------------------------------------
// Lists for each number of GPUs the layouts that fit, fastest first: all stages of ZeRO and recomputation modes, with
// micro-batches that divide each GPU's sequences: powers of two, and the largest that fits. --zero, --recompute and
// --micro-batch are kept if given. The time of a step is estimated as above; it does not depend on the micro-batch, and
// selective recomputation costs nothing with flash attention. Of equals, layouts that recompute less come first, then
// those that send less, then the larger micro-batch.

struct Candidate {
    Setup setup;
    long accumulation;
    size_t bytes;
    StepTime time;
};

// Divisors of `sequences` up to `most`: powers of two, and the largest.
std::vector<int> micro_batches_to_try(long sequences, int most) {
    std::vector<int> all;
    for (long B = 1; B <= most && sequences % B == 0; B *= 2) all.push_back(static_cast<int>(B));
    const long largest = largest_divisor(sequences, most);
    if (largest > 0 && largest != all.back()) all.push_back(static_cast<int>(largest));
    return all;
}

// The layouts that fit in `memory`. s: model, sequence, GPUs, and the options that are kept.
std::vector<Candidate> candidates(const Options& o, Setup s, size_t memory) {
    std::vector<Candidate> all;
    const long sequences = o.total_batch / (long{s.T} * s.gpus);
    const bool one_stage = o.given.count("--zero") || s.gpus == 1;
    const int stage = s.zero, micro_batch = o.given.count("--micro-batch") ? o.micro_batch : AUTO;
    for (s.zero = one_stage ? stage : 0; s.zero <= (one_stage ? stage : last_stage(s)); s.zero++)
        for (const auto& [name, mode] : RECOMPUTE_NAMES) {
            if (o.given.count("--recompute") && mode != o.recompute) continue;
            s.recompute = mode;
            const int most = static_cast<int>(std::min<long>(largest_micro_batch(s, memory), sequences));
            std::vector<int> tried = micro_batches_to_try(sequences, most);
            if (micro_batch != AUTO)
                tried.assign(micro_batch <= most && sequences % micro_batch == 0 ? 1 : 0, micro_batch);
            for (const int B : tried) {
                s.B = B;
                const long accumulation = sequences / B;
                all.push_back({s, accumulation, plan(s).total, step_time(o, s, accumulation)});
            }
        }
    return all;
}

// Times that differ by less than rounding are equal.
bool comes_before(const Candidate& a, const Candidate& b) {
    auto order = [](const Candidate& c) {
        const long long time = std::llround(1e6 * std::log(c.time.seconds));
        return std::make_tuple(time, c.setup.recompute, c.time.bytes, -c.setup.B, c.setup.zero);
    };
    return order(a) < order(b);
}

json candidate_record(const Candidate& c) {
    json record = time_record(c.time, double(c.setup.N()) * c.setup.gpus * c.accumulation);
    record.update({{"zero", c.setup.zero}, {"micro_batch", c.setup.B}, {"accumulation", c.accumulation},
                   {"recompute", recompute_name(c.setup)}, {"bytes", c.bytes}, {"bytes_sent", c.time.bytes}});
    return record;
}

// The layouts for a number of GPUs, or why there are none.
json scan_record(const Options& o, Setup s, int gpus, size_t memory) {
    s.gpus = gpus;
    s.zero = gpus > 1 ? o.zero : 0;
    json layouts = json::array();
    auto result = [&](const json& problem) {
        return json({{"gpus", gpus}, {"problem", problem}, {"layouts", layouts}});
    };
    if (o.total_batch % (long{s.T} * gpus) != 0)
        return result(format("--total-batch %ld is no multiple of --seq-len %d x %d GPUs", o.total_batch, s.T, gpus));
    std::vector<Candidate> fit = candidates(o, s, without_margin(memory));
    std::sort(fit.begin(), fit.end(), comes_before);
    for (const Candidate& c : fit) layouts.push_back(candidate_record(c));
    if (!fit.empty()) return result(nullptr);
    size_t least = BEYOND_MEMORY;
    for (const Candidate& c : fit = candidates(o, s, BEYOND_MEMORY)) least = std::min(least, c.bytes);
    return result(fit.empty() ? format("--micro-batch %d does not divide %ld sequences of each GPU", o.micro_batch,
                                       o.total_batch / (long{s.T} * gpus))
                              : format("no layout fits: the smallest takes %s", size_text(least).c_str()));
}

void print_scan(const Options& o, const Setup& s, size_t memory, const json& scans) {
    constexpr size_t TOP = 5;
    printf("model       %s\n", model_text(s.config).c_str());
    printf("a step      %ld tokens in sequences of %d; %s, gradients %s, attention %s\n", o.total_batch, s.T,
           name_of(s.precision), name_of(s.grad_dtype), attention_name(s));
    printf("a GPU       %s, of which 5 %% stay free; sends %g GB/s; computes %g TFLOP/s%s\n\n",
           size_text(memory).c_str(), o.bandwidth, flops_of(o) / 1e12, o.flops > 0 ? "" : " (assumed; --flops)");
    printf("  GPUs  ZeRO  micro-batch  accumulated  recompute      memory     step ms    exposed      tok/s\n");
    for (const json& scan : scans) {
        const int gpus = scan["gpus"];
        if (!scan["problem"].is_null()) printf("%6d  %s\n", gpus, scan["problem"].get<std::string>().c_str());
        std::set<std::pair<int, std::string>> shown;   // the best micro-batch of each ZeRO stage and recomputation mode
        for (const json& c : scan["layouts"]) {
            const std::string recompute = c["recompute"];
            if (shown.size() == TOP || !shown.emplace(c["zero"], recompute).second) continue;
            const double seconds = c["seconds"], exposed = c["exposed"];
            printf("%6s  %4d  %11d  %11ld  %-9s  %10s  %10.1f  %8.1f %%  %9s\n",
                   shown.size() == 1 ? std::to_string(gpus).c_str() : "", int(c["zero"]), int(c["micro_batch"]),
                   long(c["accumulation"]), recompute.c_str(), size_text(c["bytes"]).c_str(), 1e3 * seconds,
                   100 * exposed / seconds, short_number(c["tokens_per_s"]).c_str());
        }
        if (scan["layouts"].size() > shown.size())
            printf("%6s  and %zu more that fit: --json has them\n", "", scan["layouts"].size() - shown.size());
    }
}

void plan_scan(const Options& o, const Setup& s, size_t memory) {
    const std::pair<const char*, const char*> needed[] = {
        {"--total-batch", "TOKENS"}, {"--gpu-memory", "SIZE"}, {"--bandwidth", "GB/s"}};
    for (const auto& [flag, value] : needed)
        if (!o.given.count(flag)) throw UserError("plan --scan needs %s %s", flag, value);
    json scans = json::array();
    for (const int gpus : o.gpus) scans.push_back(scan_record(o, s, gpus, memory));
    if (!o.as_json) return print_scan(o, s, memory, scans);
    const json record = {{"model", model_record(s.config)}, {"seq_len", s.T}, {"total_batch", o.total_batch},
                         {"precision", name_of(s.precision)}, {"grad_dtype", name_of(s.grad_dtype)},
                         {"attention", attention_name(s)}, {"gpu_memory", memory}, {"bandwidth", o.bandwidth * 1e9},
                         {"flops_per_s", flops_of(o)}, {"flops_assumed", o.flops == 0}, {"scan", scans}};
    printf("%s\n", json_text(record, 2).c_str());
}

// ---- plan ---------------------------------------------------------------------------------------

// Parameters without positions: h V + L (12 h^2 + 13 h) + 2 h.
double formula_parameters(const Config& c) {
    const double h = c.channels;
    return h * c.vocab + c.layers * (12 * h * h + 13 * h) + 2 * h;
}

// Activations in mixed precision without recomputation or flash attention: L s b h (34 + 5 a s / h) bytes.
// Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.1
double formula_activations(const Setup& s) {
    const double h = s.config.channels;
    return double(s.config.layers) * s.T * s.B * h * (34 + 5.0 * s.config.heads * s.T / h);
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

json total_record(const Plan& p) {
    json bytes = bytes_record(p);
    bytes["total"] = p.total;
    return bytes;
}

json peak_records() {
    json peaks = json::array();
    for (const Peak& peak : PEAKS)
        peaks.push_back({{"name", peak.name}, {"half", 1e12 * peak.half}, {"fp32", 1e12 * peak.fp32}});
    return peaks;
}

json tensor_record(const char* name, Category category, const std::vector<size_t>& shape, size_t copies,
                   const char* dtype, size_t bytes) {
    return {{"name", name}, {"category", CATEGORY_NAMES[static_cast<int>(category)]}, {"shape", shape},
            {"copies", copies}, {"dtype", dtype}, {"bytes", bytes}};
}

json tensor_records(const Setup& s) {
    json tensors;
    for (const ParameterRow& row : parameter_table(s.config))
        tensors.push_back(tensor_record(row.name, Category::WEIGHTS, row.shape, row.copies, name_of(s.precision),
                                        row.elements * row.copies * size_of(s.precision)));
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s))
        tensors.push_back(tensor_record(row.name, row.category, row.shape, row.copies, row.dtype, row.bytes()));
    return tensors;
}

// The largest micro-batch in `memory` bytes, by recomputation mode.
json largest_micro_batches(const Setup& s, size_t memory) {
    json most;
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        Setup other = s;
        other.recompute = mode;
        most[name] = largest_micro_batch(other, memory);
    }
    return most;
}

// Weights, gradients, master weights and moments, of one GPU: ZeRO shards these.
size_t state_bytes(const Plan& p) {
    size_t bytes = 0;
    for (int category = 0; category <= static_cast<int>(Category::ADAM_V); category++) bytes += p.bytes[category];
    return bytes;
}

// The stages beside each other: for P parameters on R GPUs, with BF16 gradients, 16P, 4P + 12P/R, 2P + 14P/R and 16P/R
// bytes of state (figure 1 of Rajbhandari et al. 2020). One GPU has but one.
json stage_records(Setup s, size_t memory) {
    json stages;
    const int chosen = s.zero;
    for (s.zero = 0; s.zero <= (s.gpus > 1 ? last_stage(s) : 0); s.zero++) {
        const Plan p = plan(s);
        stages.push_back({{"zero", s.zero}, {"state", state_bytes(p)}, {"bytes", total_record(p)},
                          {"bytes_per_parameter", double(state_bytes(p)) / layout_of(s).elements()},
                          {"fits", p.total <= memory}, {"chosen", s.zero == chosen}});
    }
    return stages;
}

// The plan as one object; memory: what must hold it.
json plan_record(const Options& o, const Setup& s, size_t memory) {
    const Plan p = plan(s);
    const ParameterCount count = count_parameters(s.config);
    const long accumulation = accumulation_steps(o, s);
    const StepTime time = step_time(o, s, accumulation);
    const double tokens = double(s.N()) * s.gpus * accumulation;
    json record = {{"model", model_record(s.config)}, {"micro_batch", s.B}, {"seq_len", s.T},
                   {"precision", name_of(s.precision)}, {"grad_dtype", name_of(s.grad_dtype)},
                   {"master_weights", s.master_weights == MasterWeights::NONE ? "none" : "fp32"},
                   {"recompute", recompute_name(s)}, {"attention", attention_name(s)},
                   {"matmul", MATMUL_NAMES[static_cast<int>(s.matmul)]}, {"gpus", s.gpus}, {"zero", s.zero},
                   {"accumulation", accumulation}};
    record.update({{"parameters", count.real}, {"parameters_formula", formula_parameters(s.config)},
                   {"bytes", total_record(p)},
                   {"bytes_are_exact", p.total < BEYOND_MEMORY},   // otherwise some are lower bounds
                   {"bytes_per_parameter", double(state_bytes(p)) / layout_of(s).elements()},
                   {"activation_bytes_per_token_per_layer", double(kept_bytes_per_layer(s)) / s.N()},
                   {"korthikanti_bytes", formula_activations(s)}, {"gpu_memory", memory}, {"fits", p.total <= memory},
                   {"zero_stages", stage_records(s, memory)}, {"max_micro_batch", largest_micro_batches(s, memory)},
                   {"head_rows", s.head_rows}, {"tensors", tensor_records(s)}});
    record.update({{"flops_per_token", flops_record(s)}, {"flops_per_s", flops_of(o)}, {"flops_assumed", o.flops == 0},
                   {"bytes_sent", time.bytes},   // in a step, by each GPU
                   {"bandwidth", o.bandwidth > 0 ? json(o.bandwidth * 1e9) : json()},
                   {"step", o.bandwidth > 0 ? time_record(time, tokens) : json()}, {"peaks", peak_records()}});
    return record;
}

// The chapter's four steps from a batch in tokens to flags.
void print_steps(const Options& o, const Setup& s, const json& most) {
    if (o.total_batch == 0) return;
    const long together = long{s.T} * s.gpus, sequences = o.total_batch / together;   // of each GPU
    const std::string stage = s.gpus > 1 ? format(" --zero %d", s.zero) : "";
    printf("\nto train with %ld tokens a step\n", o.total_batch);
    printf("  1  batch     --total-batch %ld\n  2  sequence  --seq-len %d\n", o.total_batch, s.T);
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        const long B = largest_divisor(sequences, most[name].get<long>());
        if (B == 0 || o.total_batch % together != 0) continue;
        printf("  3  largest   --micro-batch %ld --recompute %s%s\n", B, name, stage.c_str());
        printf("  4  the rest  %saccumulated over %ld micro-batches%s\n",
               s.gpus > 1 ? format("on %d GPUs, ", s.gpus).c_str() : "", sequences / B,
               s.gpus > 1 ? format(" of each: %ld x %d x %ld x %d tokens", B, s.T, sequences / B, s.gpus).c_str() : "");
        return;
    }
    printf("  3  no micro-batch fits on one such GPU%s, whatever is recomputed\n",
           s.gpus > 1 ? format(" of %d with --zero %d", s.gpus, s.zero).c_str() : "");
}

void print_stages(const Setup& s, const json& record) {
    if (s.gpus == 1) return;
    printf("\n%d GPUs: bytes of each\n", s.gpus);
    printf("  ZeRO  weights, gradients, optimizer  a parameter       buffers         total\n");
    for (const json& stage : record["zero_stages"])
        printf("  %s %d  %29s  %11.2f  %12s  %12s  %s\n", stage["chosen"] ? "->" : "  ", int(stage["zero"]),
               size_text(stage["state"]).c_str(), double(stage["bytes_per_parameter"]),
               size_text(stage["bytes"]["buffers"]).c_str(), size_text(stage["bytes"]["total"]).c_str(),
               stage["fits"] ? "fits" : "does not fit");
}

void print_time(const Options& o, const Setup& s, const json& record) {
    const std::string rate = format("%g TFLOP/s%s", double(record["flops_per_s"]) / 1e12,
                                    record["flops_assumed"] ? ", assumed" : "");
    if (s.gpus > 1) printf("each sends  %s a step\n", size_text(double(record["bytes_sent"])).c_str());
    if (record["step"].is_null()) return;
    const json& step = record["step"];
    auto ms = [&](const char* what) { return 1e3 * double(step[what]); };
    printf("a step      %.1f ms of computing at %s\n", ms("computing"), rate.c_str());
    if (s.gpus > 1)
        printf("            %.1f ms of sending at %g GB/s: %.1f hidden under it, %.1f exposed\n", ms("sending"),
               o.bandwidth, ms("hidden"), ms("exposed"));
    printf("            %.1f ms: %s tok/s at best, estimated\n", ms("seconds"),
           short_number(double(step["tokens_per_s"])).c_str());
}

// Activations, largest first, that are half a percent of them or more.
void print_activations(const json& record) {
    const size_t all = record["bytes"]["activations"];
    std::multimap<size_t, json, std::greater<>> rows;   // by bytes, and then in the table's order
    for (const json& tensor : record["tensors"])
        if (tensor["category"] == "activations" && size_t(tensor["bytes"]) * 200 >= all)
            rows.emplace(tensor["bytes"], tensor);
    printf("\nactivations\n");
    for (const auto& [bytes, row] : rows) {
        const std::string copies = row["copies"] > 1 ? format(" x %d", int(row["copies"])) : "";
        printf("  %-11s %14s  %-28s %s\n", row["name"].get<std::string>().c_str(), size_text(bytes).c_str(),
               (shape_text(row["shape"]) + copies).c_str(), bar(double(bytes) / all).c_str());
    }
}

void print_plan(const Options& o, const Setup& s, const json& record, size_t memory) {
    auto text = [&](const char* key) { return record[key].get<std::string>(); };
    printf("model       %s\n", model_text(s.config).c_str());
    printf("parameters  %zu; by the formula hV + L(12h^2 + 13h) + 2h, without positions, %.0f\n",
           size_t(record["parameters"]), double(record["parameters_formula"]));
    const std::string gpus = s.gpus > 1 ? format("%d GPUs x ", s.gpus) : "";
    printf("a step      %s%d x %d tokens, accumulated %ld times; %s, gradients %s, recompute %s, attention %s%s\n\n",
           gpus.c_str(), s.B, s.T, long(record["accumulation"]), name_of(s.precision), name_of(s.grad_dtype),
           text("recompute").c_str(), text("attention").c_str(),
           s.matmul == MatmulIn::FLOATX ? "" : (", matmul " + text("matmul")).c_str());
    print_memory(plan(s), memory);
    printf("  %s; %.2f bytes of state per parameter\n", record["fits"] ? "fits" : "does not fit on one such GPU",
           double(record["bytes_per_parameter"]));
    print_stages(s, record);
    print_time(o, s, record);
    print_activations(record);
    const double kept = record["activation_bytes_per_token_per_layer"];
    const char* more = kept * s.N() < BEYOND_MEMORY ? "" : "more than ";
    const double formula = std::min(double(record["korthikanti_bytes"]), double(BEYOND_MEMORY));
    printf("  kept per token and layer: %s%.0f bytes = %.1f C; Korthikanti et al., without flash attention: %s in "
           "all\n", more, kept, kept / s.config.channels, size_text(formula).c_str());
    const json& flops = record["flops_per_token"];
    printf("\nFLOPs per token: %.4g model, %.4g hardware\n", double(flops["model"]), double(flops["hardware"]));
    printf("largest micro-batch:");
    for (const auto& [mode, most] : record["max_micro_batch"].items())
        printf("  %d with --recompute %s", int(most), mode.c_str());
    printf("\n");
    print_steps(o, s, record["max_micro_batch"]);
}

size_t parse_bytes(const std::string& text) {
    constexpr std::pair<const char*, double> UNITS[] = {
        {"GiB", 1 << 30}, {"MiB", 1 << 20}, {"GB", 1e9}, {"MB", 1e6}};
    for (const auto& [unit, factor] : UNITS) {
        double number;
        if (!ends_with(text, unit) || !parse_number(text.substr(0, text.size() - strlen(unit)), number)) continue;
        if (number > 0 && number * factor < BEYOND_MEMORY) return number * factor;
    }
    throw UserError("--gpu-memory takes a size such as 80GB or 24GiB, found '%s'", text.c_str());
}

void plan_subcommand(Options o) {
    if (!o.gpu_memory.empty() && !o.given.count("--precision")) o.precision = PlanPrecision::BF16;  // as a card does
    if (o.gpus.front() == ALL_GPUS) throw UserError("--gpus all: plan needs a number");
    if (!o.scan && o.gpus.size() > 1)
        throw UserError("--gpus: several numbers are for plan --scan, found %zu", o.gpus.size());
    const std::string problem = o.gpu_memory.empty() ? no_device() : "";
    if (!problem.empty()) throw UserError("plan needs --gpu-memory SIZE here: %s", problem.c_str());
    const size_t memory = o.gpu_memory.empty() ? memory_now().all : parse_bytes(o.gpu_memory);
    const Config config = o.from.empty() ? config_from_options(o, 0) : config_of_folder(o, o.from);
    Setup setup = make_setup(o, config, Purpose::TRAINING, memory);
    setup.on_gpu |= !o.gpu_memory.empty();   // planned here, to run there
    if (o.scan) return plan_scan(o, setup, memory);
    const json record = plan_record(o, setup, memory);
    if (o.as_json) printf("%s\n", json_text(record, 2).c_str());
    else print_plan(o, setup, record, memory);
}
