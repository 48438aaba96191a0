// Options of a run, the table of their flags, --help.
#pragma once

#include <functional>
#include <optional>
#include <set>

#include "files.h"

enum class DType { FP32, BF16, FP16, E4M3, E5M2 };   // the last two, FP8, are operands of matmuls only
enum class TensorCores { AUTO, NONE, MMA, WGMMA };   // instructions of flash attention; WGMMA: Hopper only
constexpr const char* TENSOR_CORE_NAMES[] = {"auto", "none", "mma", "wgmma"};
enum class Recompute { NONE, SELECTIVE, FULL };
constexpr std::pair<const char*, Recompute> RECOMPUTE_NAMES[] = {
    {"none", Recompute::NONE}, {"selective", Recompute::SELECTIVE}, {"full", Recompute::FULL}};
enum class Attention { FLASH, NAIVE };
enum class MatmulIn { FLOATX, FP8, FP8_ALL };
constexpr const char* MATMUL_NAMES[] = {"plain", "fp8", "fp8-all"};
enum class Fp8Scaling { DELAYED, CURRENT, NONE };
constexpr const char* FP8_SCALING_NAMES[] = {"delayed", "current", "none"};
enum class Fp8Accumulation { FP32, FAST };
constexpr const char* FP8_ACCUMULATION_NAMES[] = {"fp32", "fast"};
enum class MasterWeights { FP32, NONE };
enum class Optimizer { ADAMW, MUON };
enum class PeakSource { TABLE, MEASURED };
enum class UseGraph { AUTO, OFF, ON };
enum class Shuffle { NO, YES };
enum class PlanPrecision { FP32, BF16, FP16, OF_BUILD };   // the first three as in DType
enum class Schedule { COSINE, LINEAR, WSD, CONSTANT };

// --loss-scaling: one of these, or a fixed scale.
constexpr double DYNAMIC_SCALE = 0, NO_SCALE = 1, SCALE_BY_PRECISION = -1;
constexpr double MAX_LOSS_SCALE = 1 << 24;
constexpr double MAX_Z = 11.26;   // of --skip-spikes: a z-score of 128 values is at most sqrt(127) = 11.27

// A model's sizes.
struct Config {
    int layers, heads, channels, context, vocab;

    int head_size() const { return channels / heads; }
    // Rows of wte in memory: a multiple of 128 makes the head's matmul fast (50257 -> 50304). Files have vocab rows.
    int padded_vocab() const { return (vocab + 127) / 128 * 128; }
};

// The batch grows linearly from `from` tokens over the first `tokens` tokens of training. 0: no ramp.
struct BatchRamp { long from = 0, tokens = 0; };

struct Options {
    // model
    std::string model = "gpt2", from;
    int layers = 0, heads = 0, channels = 0, context = 0, vocab = 0, eot = -1;
    // data
    std::string data, val_data, hellaswag;
    double val_fraction = 0.1;
    Shuffle shuffle = Shuffle::YES;
    // a step
    int micro_batch = 4, seq_len = 0;
    long total_batch = 0;
    BatchRamp batch_ramp;
    long noise_every = 0;
    Recompute recompute = Recompute::NONE;
    DType grad_dtype = DType::FP32;
    double loss_scaling = SCALE_BY_PRECISION;
    MasterWeights master_weights = MasterWeights::FP32;
    Attention attention = Attention::FLASH;
    TensorCores tensor_cores = TensorCores::AUTO;
    MatmulIn matmul = MatmulIn::FLOATX;
    Fp8Scaling fp8_scaling = Fp8Scaling::DELAYED;
    Fp8Accumulation fp8_accumulation = Fp8Accumulation::FP32;
    // optimizer
    long steps = 1000, tokens = 0;
    double minutes = 0;            // tokens or minutes, if one is not 0, replaces steps
    double warmup = 0;             // steps; below 1: fraction of the run
    double lr = 6e-4, min_lr = -1;
    Schedule schedule = Schedule::COSINE;
    Optimizer optimizer = Optimizer::ADAMW;
    double weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95, eps = 1e-8, grad_clip = 1.0, skip_spikes = 0;
    long seed = 1337;
    PeakSource peak = PeakSource::TABLE;
    bool matmul_tuning = true;
    UseGraph graph = UseGraph::AUTO;
    int threads = 0;
    // many GPUs
    int gpus = 1, tensor_parallel = 1, zero = 0;   // gpus: a number, or ALL_GPUS
    bool overlap = true;
    double timeout = 300;
    // run folder
    std::string out, trace;
    int resume = 0;   // 1, or AUTO: if --out holds a run
    bool verbose = false;
    long eval_every = 250, eval_sequences = 80, sample_every = 0, checkpoint_every = 1000;
    int keep = 0;
    // samples
    std::string prompt = "\n", prompt_tokens, stop;
    int samples = 1, sample_tokens = 256, top_k = 0;
    double temperature = 1.0, top_p = 1.0;
    // plan
    PlanPrecision precision = PlanPrecision::OF_BUILD;
    double gpu_memory = 0, bandwidth = 0, tensor_bandwidth = 300, flops = 0;   // bytes, GB/s, TFLOP/s
    bool scan = false, as_json = false;

    std::set<std::string> given;   // the flags on the command line
};

const std::set<std::string> BUDGETS = {"--steps", "--tokens", "--minutes"};   // one determines the length of a run

enum Subcommand { TRAIN = 1, EVAL = 2, SAMPLE = 4, PLAN = 8 };
constexpr int ALL = TRAIN | EVAL | SAMPLE | PLAN;
constexpr int COMMON = 16;   // with subcommands of a flag: --help lists it, not only --help all
const std::pair<const char*, Subcommand> SUBCOMMANDS[] = {
    {"train", TRAIN}, {"eval", EVAL}, {"sample", SAMPLE}, {"plan", PLAN}};

constexpr int AUTO = -1;                 // --micro-batch auto, --resume auto
constexpr int MAX_SEQUENCES = 1 << 15;   // of a micro-batch: attention's gridDim.z, which CUDA limits to 65535
constexpr int ALL_GPUS = 0;              // --gpus all
constexpr int MAX_GPUS = 1 << 16;
constexpr int MAX_THREADS = 1024;        // dev/cpu's maximum
constexpr long MAX_STEPS = 1000000000000, MAX_STEP_TOKENS = MAX_STEPS;   // far above real runs; sums fit in a long

struct Flag {
    const char* name;
    int subcommands;           // those that accept the flag, and COMMON
    std::string placeholder;   // of the value in --help: N, DIR, none|fp32
    std::string values;        // the valid values in words: a whole number, at least 1
    const char* example;       // a value or arguments, which example_command() completes
    const char* text;          // --help prints the first sentence, which ends with "(default: ...)" if the default
                               // depends on other things; --help FLAG prints all
    std::function<bool(const std::string&)> parse;   // false: not a valid value
    std::function<json()> value;
    bool is_switch = false;    // has no value or, if `values` is not empty, an optional one
    const char* group = "";    // heading in --help
};

// One row per flag, bound to the members of o: defaults, parsing, --help and the log come from this table.
std::vector<Flag> flag_table(Options& o);

// Both throw UserError for an unknown word, with the most similar name that exists.
const std::pair<const char*, Subcommand>& parse_subcommand(const std::string& word);
Options parse_options(Subcommand subcommand, const char* name, const std::vector<std::string>& args);

// Returns the word after --help or -h, empty if it is missing; nullopt if args do not ask for help.
std::optional<std::string> help_topic(const std::vector<std::string>& args);
size_t terminal_columns();   // of standard output; 0 if it is not a terminal or its width is unknown
size_t help_width();         // columns of --help: the terminal's, or $COLUMNS, or 100; at least 60
// Returns the list of the options of `subcommands`, with train only the COMMON ones, or help on `topic` if it is not
// empty: "all" lists all options of `subcommands`, "markdown" is a page with all; a subcommand; a flag.
std::string help_text(int subcommands, const std::string& topic = "", size_t width = help_width());
std::string example_command(const Flag& flag);

// All options of a subcommand, for the log.
json describe(Options options, Subcommand subcommand);
