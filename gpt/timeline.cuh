// A step of many GPUs in time: what is computed, what is sent, and how much of that is hidden under the computation.
// Included by plan.cuh.
//
// Two work at the same time, each at one thing after the other: the GPU, which computes, and its link, which sends.
// The order is the program's own: CommunicationSchedule in distributed.cuh. What is sent begins when all
// that was to be computed before it is done and the link is free. What is computed waits for the weights that it
// needs and for the buffers of gradients that it fills. So layer l's gradients go under the backward of the layers
// below it, layer l + 1's weights under the forward or backward of its neighbour, and group 0 is exposed twice: its
// gradients at the end of the last micro-batch, its weights (with ZeRO 1 and up) at the beginning of the next step.
//
// assumed  FLOPs take their time at one sustained rate, whatever the micro-batch (on a GPU a small one is slower, left
//          out here) and whatever is sent meanwhile (NCCL takes some of the GPU's processors). Bytes take theirs at one
//          bandwidth, as in rings whose slowest link has it, without latency: of small models with many GPUs that is
//          most of the truth. GPUs never wait for each other.
// left out the update, loading data, all that is no FLOP of flops_per_token(), and what the norm and the losses send:
//          some kilobytes.
#pragma once

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

// TFLOP/s that a GPU sustains unless --flops says: 40 % of what PEAKS has for an H100.
constexpr double ASSUMED_TFLOPS_BF16 = 400, ASSUMED_TFLOPS_FP32 = 27;

double flops_of(const Options& o) {
    return 1e12 * (o.flops > 0 ? o.flops : o.precision == DType::FP32 ? ASSUMED_TFLOPS_FP32 : ASSUMED_TFLOPS_BF16);
}

// Without --bandwidth what is sent takes no time.
StepTime step_time(const Options& o, const Setup& s, long micro_batches) {
    return step_time(step_work(s, flops_of(o), o.bandwidth > 0 ? o.bandwidth * 1e9 : INFINITY), micro_batches);
}

json time_record(const StepTime& t, double tokens) {
    return {{"seconds", t.seconds}, {"computing", t.computing}, {"sending", t.sending}, {"hidden", t.hidden()},
            {"exposed", t.exposed()}, {"tokens_per_s", tokens / t.seconds}};
}
