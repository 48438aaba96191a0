// `train_gpt plan --scan`: for each number of GPUs the layouts that fit, fastest first. Included by plan.cuh.
//
// Tried are all stages of ZeRO and all ways to recompute, with micro-batches that divide each GPU's sequences: powers
// of two, and the largest that fits; --zero, --recompute and --micro-batch, where they are given, stay as they are. How
// long a step takes is timeline.cuh's estimate. In it a larger micro-batch is no faster in itself, and selective
// recomputation costs nothing with flash attention: of equals, those that recompute less come first, then those that
// send less, then the larger micro-batch.
//
// bound by  what keeps a layout from being faster. A step's ideal time is the model's FLOPs at --flops; a layout loses
//           what it recomputes and what is exposed of its sending. It is bound by
//             compute    if it loses less than a tenth of the step;
//             memory     else, if it is the fastest of its stage that fits, and in unlimited memory the stage would
//                        lose less than half as much: what makes up the difference is recomputed, or sent once more
//                        for each further micro-batch, because a larger one does not fit;
//             bandwidth  else, if most of the loss is exposed (of a stage's fastest: of what it would lose even then);
//             compute    else: it recomputes what it could keep.
#pragma once

// 8 or 8,24,64 or 8..512, of which the powers of two are meant; false: something else.
bool parse_gpu_counts(const std::string& text, std::vector<int>& to) {
    auto parse = [](const std::string& s, int& n) { return parse_number(s, n) && n >= 1 && n <= MOST_GPUS; };
    std::vector<int> counts;
    const size_t dots = text.find("..");
    if (dots != text.npos) {
        int first, last;
        if (!parse(text.substr(0, dots), first) || !parse(text.substr(dots + 2), last)) return false;
        for (int n = 1; n <= last; n *= 2)
            if (n >= first) counts.push_back(n);
    } else {
        std::istringstream all(text);
        for (std::string one; std::getline(all, one, ',');)
            if (!parse(one, counts.emplace_back())) return false;
    }
    if (counts.empty() || text.back() == ',') return false;
    to = counts;
    return true;
}

struct Candidate {
    Setup setup;
    long accumulation;
    size_t bytes;
    StepTime time;
    const char* bound = "";
};

double tokens_of(const Candidate& c) { return double(c.setup.N()) * c.setup.gpus * c.accumulation; }
double tokens_per_second(const Candidate& c) { return tokens_of(c) / c.time.seconds; }

// Divisors of `sequences` up to `most`: powers of two, and the largest.
std::vector<int> micro_batches_to_try(long sequences, int most) {
    std::vector<int> all;
    for (long B = 1; B <= most && sequences % B == 0; B *= 2) all.push_back(static_cast<int>(B));
    long largest = std::min<long>(most, sequences);
    while (largest > 0 && sequences % largest != 0) largest--;
    if (largest > 0 && largest != all.back()) all.push_back(static_cast<int>(largest));
    return all;
}

// What fits in `memory`. s: model, sequence, GPUs, and what stays as it is.
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

// Times that differ by less than rounding are alike.
bool comes_before(const Candidate& a, const Candidate& b) {
    auto order = [](const Candidate& c) {
        const long long time = std::llround(1e6 * std::log(c.time.seconds));
        return std::make_tuple(time, c.setup.recompute, c.time.bytes, -c.setup.B, c.setup.zero);
    };
    return order(a) < order(b);
}

const Candidate& fastest_of_stage(const std::vector<Candidate>& all, int zero) {
    auto seconds = [&](const Candidate& c) { return c.setup.zero == zero ? c.time.seconds : INFINITY; };
    return *std::min_element(all.begin(), all.end(), [&](const Candidate& a, const Candidate& b) {
        return seconds(a) < seconds(b);
    });
}

// c is of `fit`, all that fit; free: all that would fit in unlimited memory.
const char* bound_of(const Candidate& c, const std::vector<Candidate>& fit, const std::vector<Candidate>& free,
                     double flops) {
    constexpr double ROUNDING = 1 + 1e-9;
    const double ideal = flops_per_token(c.setup).model * c.setup.N() * c.accumulation / flops;
    auto loss = [&](const Candidate& of) { return of.time.seconds - ideal; };
    if (loss(c) < 0.1 * c.time.seconds) return "compute";
    const bool fastest = c.time.seconds <= fastest_of_stage(fit, c.setup.zero).time.seconds * ROUNDING;
    const Candidate& best = fastest ? fastest_of_stage(free, c.setup.zero) : c;
    if (loss(best) < loss(c) / 2) return "memory";
    return best.time.exposed() > loss(best) / 2 ? "bandwidth" : "compute";
}

struct Scan {
    int gpus;
    std::string problem;             // why there are no layouts
    std::vector<Candidate> fit;      // the best first
};

Scan scan(const Options& o, Setup s, int gpus, size_t memory) {
    Scan result = {gpus, "", {}};
    s.gpus = gpus;
    s.zero = gpus > 1 ? o.zero : 0;
    if (o.total_batch % (long{s.T} * gpus) != 0) {
        result.problem = format("--total-batch %ld is no multiple of --seq-len %d x %d GPUs", o.total_batch, s.T, gpus);
        return result;
    }
    const std::vector<Candidate> free = candidates(o, s, BEYOND_MEMORY);
    result.fit = candidates(o, s, without_margin(memory));
    for (Candidate& c : result.fit) c.bound = bound_of(c, result.fit, free, flops_of(o));
    std::sort(result.fit.begin(), result.fit.end(), comes_before);
    if (!result.fit.empty()) return result;
    size_t least = BEYOND_MEMORY;
    for (const Candidate& c : free) least = std::min(least, c.bytes);
    result.problem = free.empty() ? format("--micro-batch %d does not divide %ld sequences of each GPU", o.micro_batch,
                                           o.total_batch / (long{s.T} * gpus))
                                  : format("no layout fits: the smallest takes %s", size_text(least).c_str());
    return result;
}

json candidate_record(const Candidate& c) {
    json record = time_record(c.time, tokens_of(c));
    record.update({{"zero", c.setup.zero}, {"micro_batch", c.setup.B}, {"accumulation", c.accumulation},
                   {"recompute", RECOMPUTE_NAMES[static_cast<int>(c.setup.recompute)].first}, {"bytes", c.bytes},
                   {"bytes_sent", c.time.bytes}, {"bound", c.bound}});
    return record;
}

json scan_record(const Options& o, const Setup& s, size_t memory, const std::vector<Scan>& scans) {
    json all = json::array();
    for (const Scan& scan : scans) {
        json layouts = json::array();
        for (const Candidate& c : scan.fit) layouts.push_back(candidate_record(c));
        all.push_back({{"gpus", scan.gpus}, {"problem", scan.problem.empty() ? json() : json(scan.problem)},
                       {"layouts", layouts}});
    }
    return {{"model", model_record(s.config)}, {"seq_len", s.T}, {"total_batch", o.total_batch},
            {"precision", name_of(s.precision)}, {"grad_dtype", name_of(s.grad_dtype)},
            {"attention", s.attention == Attention::FLASH ? "flash" : "naive"}, {"gpu_memory", memory},
            {"bandwidth", o.bandwidth * 1e9}, {"flops_per_s", flops_of(o)}, {"flops_assumed", o.flops == 0},
            {"scan", all}};
}

void print_scan(const Options& o, const Setup& s, size_t memory, const std::vector<Scan>& scans) {
    constexpr size_t TOP = 5;
    printf("model       %s\n", model_text(s.config).c_str());
    printf("a step      %ld tokens in sequences of %d; %s, gradients %s, attention %s\n", o.total_batch, s.T,
           name_of(s.precision), name_of(s.grad_dtype), s.attention == Attention::FLASH ? "flash" : "naive");
    printf("a GPU       %s, of which 5 %% stay free; sends %g GB/s; computes %g TFLOP/s%s\n\n",
           size_text(memory).c_str(), o.bandwidth, flops_of(o) / 1e12, o.flops > 0 ? "" : " (assumed; --flops)");
    printf("  GPUs  ZeRO  micro-batch  accumulated  recompute      memory     step ms    exposed      tok/s  bound by"
           "\n");
    for (const Scan& scan : scans) {
        if (!scan.problem.empty()) printf("%6d  %s\n", scan.gpus, scan.problem.c_str());
        std::set<std::pair<int, Recompute>> shown;   // of each stage and way to recompute the best micro-batch
        for (const Candidate& c : scan.fit) {
            if (shown.size() == TOP || !shown.emplace(c.setup.zero, c.setup.recompute).second) continue;
            printf("%6s  %4d  %11d  %11ld  %-9s  %10s  %10.1f  %8.1f %%  %9s  %s\n",
                   shown.size() == 1 ? std::to_string(scan.gpus).c_str() : "", c.setup.zero, c.setup.B, c.accumulation,
                   RECOMPUTE_NAMES[static_cast<int>(c.setup.recompute)].first, size_text(c.bytes).c_str(),
                   1e3 * c.time.seconds, 100 * c.time.exposed() / c.time.seconds,
                   short_number(tokens_per_second(c)).c_str(), c.bound);
        }
        if (scan.fit.size() > shown.size())
            printf("%6s  and %zu more that fit: --json has them\n", "", scan.fit.size() - shown.size());
    }
}

void require_for_scan(const Options& o) {
    std::string missing;
    const std::pair<const char*, const char*> needed[] = {
        {"--total-batch", "TOKENS"}, {"--gpu-memory", "SIZE"}, {"--bandwidth", "GB/s"}};
    for (const auto& [flag, what] : needed)
        if (!o.given.count(flag)) missing += format("%s%s %s", missing.empty() ? "" : ", ", flag, what);
    if (!missing.empty()) throw UserError("plan --scan needs %s", missing.c_str());
}

void scan_verb(const Options& o, const Setup& s, size_t memory) {
    std::vector<Scan> scans;
    for (const int gpus : o.gpus) scans.push_back(scan(o, s, gpus, memory));
    if (o.as_json) printf("%s\n", scan_record(o, s, memory, scans).dump(2).c_str());
    else print_scan(o, s, memory, scans);
}
