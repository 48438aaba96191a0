// Data parallelism, ZeRO and tensor parallelism: the communication of a training step and its order. Included by
// train_gpt.cu, whose section "many GPUs" describes them. With one GPU the functions called by train_gpt.cu do nothing.
#pragma once

#include <memory>
#include <vector>

// ---- collectives

// Makes work launched later on device.stream wait for this communication event.
void await_sent(cudaEvent_t event) { check(cudaStreamWaitEvent(device.stream, event, 0), "cudaStreamWaitEvent"); }

// Runs call() on the group's stream after all work launched so far, and records the event `sent` after it. Later work
// on device.stream overlaps it until await_sent(), unless --overlap is off. bytes: the collective's total, of which a
// rank of R sends (R - 1) / R.
template <typename F, typename... Memory>
void send(const Group& group, const char* name, cudaEvent_t sent, double bytes, F call, const Memory&... memory) {
    check(cudaEventRecord(world.computed, device.stream), "cudaEventRecord");
    check(cudaStreamWaitEvent(group.stream, world.computed, 0), "cudaStreamWaitEvent");
    on_stream(name, group.stream, [&] { check(call(), name); }, memory...);
    check(cudaEventRecord(sent, group.stream), "cudaEventRecord");
    world.bytes_sent += bytes * (group.size - 1) / group.size;
    if (world.overlap == Overlap::OFF) await_sent(sent);
}

// x (n) = sum (or maximum) of all ranks' x
void all_reduce(const Group& g, cudaEvent_t sent, void* x, size_t n, DType dtype, ncclRedOp_t operation = ncclSum) {
    auto call = [&] { return ncclAllReduce(x, x, n, nccl_type(dtype), operation, g.comm, g.stream); };
    send(g, "all-reduce", sent, 2.0 * n * size_of(dtype), call, updated(x));
}

// out (n) = this rank's shard of the sum of all ranks' inp (ranks, n)
void reduce_scatter(const Group& g, cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype) {
    auto call = [&] { return ncclReduceScatter(inp, out, n, nccl_type(dtype), ncclSum, g.comm, g.stream); };
    send(g, "reduce-scatter", sent, 1.0 * n * g.size * size_of(dtype), call, out, inp);
}

// x (n) of the rank `root` = sum of all ranks' x
void reduce_to(const Group& g, cudaEvent_t sent, void* x, size_t n, DType dtype, size_t root) {
    auto call = [&] {
        return ncclReduce(x, x, n, nccl_type(dtype), ncclSum, static_cast<int>(root), g.comm, g.stream);
    };
    send(g, "reduce", sent, 1.0 * n * size_of(dtype), call, updated(x));
}

// out (ranks, n) = all ranks' inp (n)
void all_gather(const Group& g, cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype) {
    auto call = [&] { return ncclAllGather(inp, out, n, nccl_type(dtype), g.comm, g.stream); };
    send(g, "all-gather", sent, 1.0 * n * g.size * size_of(dtype), call, out, inp);
}

// out (n) = inp (n) of the rank `root`
void broadcast(const Group& g, cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype, size_t root) {
    auto call = [&] { return ncclBroadcast(inp, out, n, nccl_type(dtype), static_cast<int>(root), g.comm, g.stream); };
    send(g, "broadcast", sent, 1.0 * n * size_of(dtype), call, out, inp);
}

// x (n) fp32 = sum (or maximum) of all ranks' x
void over_gpus(float* x, size_t n, ncclRedOp_t operation = ncclSum) {
    if (world.alone()) return;
    all_reduce(world, world.sent, x, n, DType::FP32, operation);
    await_sent(world.sent);
}

// ---- tensor parallelism
// n: the elements of all rows. Work launched after gather_rows() or sum_rows() overlaps it until await_rows().

// Returns this rank's n elements of a tensor of all rows.
template <typename T> T* own_rows(T* whole, size_t n) { return whole + tensor_ranks.rank * n; }

// Returns what a LayerNorm writes: `own`, this rank's rows, from which gather_rows() gathers x; on one GPU x itself.
Operand own_rows(const Operand& x, floatX* own) { return tensor_ranks.alone() ? x : Operand(own); }

// Returns x as the gradient of a weight reads it: without FP8, unless both operands have transposed copies.
Operand for_weights(const Operand& x) { return x.transposed ? x : Operand(x.x); }

// x = own rows of all ranks
void gather_rows(const Operand& x, const Operand& own, size_t n) {
    if (tensor_ranks.alone()) return;
    all_gather(tensor_ranks, tensor_ranks.sent, x.x, own.x, n / tensor_ranks.size, FLOATX);
}

// own = this rank's rows of the sum of all ranks' x
void sum_rows(floatX* own, const floatX* x, size_t n) {
    if (tensor_ranks.alone()) return;
    reduce_scatter(tensor_ranks, tensor_ranks.sent, own, x, n / tensor_ranks.size, FLOATX);
}

void await_rows() {
    if (!tensor_ranks.alone()) await_sent(tensor_ranks.sent);
}
// Also writes FP8 copies of the gathered rows. So each rank's amax is that of all rows.
void await_rows(const Operand& x, size_t n) {
    if (tensor_ranks.alone()) return;
    await_rows();
    x.quantise(n);
}

// out (N,C) += add (N,C) + b (C), after sum_rows(). cost: bandwidth, reads 2 and writes 1 of N*C
__global__ void add_residual_kernel(floatX* out, const floatX* add, const floatX* b, size_t n, int C) {
    const Span span = my_span(n);
    for (size_t i = span.begin; i < span.end; i += span.stride) {
        float x[PACK], y[PACK], z[PACK];
        load(x, out + i);
        load(y, add + i);
        load(z, b + i % C);
        for (int k = 0; k < PACK; k++) x[k] += y[k] + z[k];
        store(out + i, x);
    }
}
void add_residual(floatX* out, const floatX* add, const floatX* b, size_t N, int C) {
    launch("add_residual", add_residual_kernel, span_blocks(N * C), BLOCK, 0, updated(out), add, b, N * C, C);
}

// Sends logits (n) from the tensor rank that has computed them to the others.
void broadcast_logits(floatX* logits, size_t n, size_t from) {
    if (tensor_ranks.alone()) return;
    broadcast(tensor_ranks, tensor_ranks.sent, logits, logits, n, FLOATX, from);
    await_rows();
}

// ---- schedule

// Slots are buffers for the whole weights or gradients of a group. Slot 0 is group 0's; layers share the others.
size_t slot_of(size_t g, size_t layer_slots) { return g == 0 ? 0 : 1 + (g - 1) % layer_slots; }

// The order of communication in a step. Communication executes it; Timeline (plan.cuh) estimates its time.
class CommunicationSchedule {
public:
    CommunicationSchedule(int zero, size_t layers)
        : zero_(zero), layers_(layers), weight_slots_(weight_copies(zero, layers)),
          grad_slots_(grad_copies(zero, layers)), holds_(1 + weight_slots_, NO_GROUP) {}
    virtual ~CommunicationSchedule() = default;

    // Called before group g's weights are used. Starts to gather them and, in advance, those of all groups if each
    // layer has a slot of its own (ZeRO 1 and 2), otherwise those of group `next`. Then waits for group g's.
    void need_weights(size_t g, size_t next) {
        if (zero_ == 0) return;
        gather_once(g);
        if (weight_slots_ < layers_) gather_once(next);
        else for (size_t group = 0; group <= layers_; group++) gather_once(group);
        await_weights(slot_of(g, weight_slots_));
    }
    // Called after the update: marks all gathered weights as out of date.
    void weights_changed() { std::fill(holds_.begin(), holds_.end(), NO_GROUP); }

    // Called before gradients of group g are computed.
    void begin_gradients(size_t g) {
        if (zero_ >= 2) begin(g, slot_of(g, grad_slots_));
    }
    // Called when group g's gradients of this micro-batch are complete.
    void send_gradients(size_t g, MicroBatch which) {
        if (zero_ >= 2 || which == MicroBatch::LAST) reduce(g, slot_of(g, grad_slots_));
    }

protected:
    virtual void gather(size_t g, size_t slot) = 0;
    virtual void await_weights(size_t slot) = 0;
    virtual void begin(size_t g, size_t slot) = 0;
    virtual void reduce(size_t g, size_t slot) = 0;

    static constexpr size_t NO_GROUP = ~size_t{0};
    const int zero_;
    const size_t layers_, weight_slots_, grad_slots_;   // slots: the number of layers whose buffers exist at a time

private:
    void gather_once(size_t group) {
        const size_t slot = slot_of(group, weight_slots_);
        if (group <= layers_ && std::exchange(holds_[slot], group) != group) gather(group, slot);
    }
    std::vector<size_t> holds_;   // by slot: the group whose weights it holds or is receiving
};

class Communication : public CommunicationSchedule {
public:
    explicit Communication(Model& m)
        : CommunicationSchedule(m.setup.zero, m.layout.layers), m_(m), gathered_(1 + weight_slots_),
          reduced_(1 + grad_slots_) {
        for (auto* events : {&gathered_, &reduced_})
            for (cudaEvent_t& event : *events)
                check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    }
    ~Communication() override {
        for (const auto* events : {&gathered_, &reduced_})
            for (const cudaEvent_t event : *events) cudaEventDestroy(event);
    }
    void await_gradients() const { for (const cudaEvent_t event : reduced_) await_sent(event); }

private:
    // The ranks that share group g: see Layout::ranks().
    static const Group& sharing(size_t g) { return g == 0 ? world : data_ranks; }

    // The offset of a slot in the buffers, in elements.
    size_t slot_begin(size_t slot) const { return slot == 0 ? 0 : m_.layout.common + (slot - 1) * m_.layout.layer; }

    char* buffer(size_t slot) const {   // whole gradients
        return static_cast<char*>(m_.grad_buffers.data) + slot_begin(slot) * size_of(m_.grads.dtype);
    }

    void gather(size_t g, size_t slot) override {
        const Layout& y = m_.layout;
        floatX* const whole = m_.weight_buffers + slot_begin(slot);
        const floatX* shard = m_.weights + y.own_shard(g, weights_placement(m_.setup));
        if (g > 0 && y.by_layer) broadcast(world, gathered_[slot], whole, whole, y.layer, FLOATX, y.owner(g));
        else all_gather(sharing(g), gathered_[slot], whole, shard, y.shard(g), FLOATX);
    }
    void await_weights(size_t slot) override { await_sent(gathered_[slot]); }

    // Initialises a buffer with zeros and, in this rank's shard, the gradients accumulated so far. The sum over ranks
    // then includes earlier micro-batches.
    void begin(size_t g, size_t slot) override {
        const Layout& y = m_.layout;
        const size_t size = size_of(m_.grads.dtype), shard = y.shard(g) * size;
        char* whole = buffer(slot);
        const void* so_far = grad_at(m_, y.own_shard(g, Placement::SHARDED)).data;
        await_sent(reduced_[slot]);
        clear(whole, y.group(g) * size);
        on_stream("copy shard", device.stream, [&] {
            check(cudaMemcpyAsync(whole + y.number(g, y.rank) * shard, so_far, shard, cudaMemcpyDeviceToDevice,
                                  device.stream), "cudaMemcpyAsync");
        }, whole, so_far);
    }
    void reduce(size_t g, size_t slot) override {
        const Layout& y = m_.layout;
        const DType dtype = m_.grads.dtype;
        void* whole = buffer(slot);
        void* shard = grad_at(m_, y.own_shard(g, grads_placement(m_.setup))).data;
        if (zero_ == 0) all_reduce(sharing(g), reduced_[slot], whole, y.group(g), dtype);
        else if (g > 0 && y.by_layer) reduce_to(world, reduced_[slot], whole, y.layer, dtype, y.owner(g));
        else reduce_scatter(sharing(g), reduced_[slot], shard, whole, y.shard(g), dtype);
    }

    Model& m_;
    std::vector<cudaEvent_t> gathered_, reduced_;   // by slot
};

// ---- in a step

void need_weights(Model& m, size_t g, size_t next) {
    if (world.alone()) return;
    m.communication->need_weights(g, next);
}

// Called after the update.
void weights_changed(Model& m) {
    if (!world.alone()) m.communication->weights_changed();
}

void begin_gradients(Model& m, size_t g) {
    if (!world.alone()) m.communication->begin_gradients(g);
}

void send_gradients(Model& m, size_t g) {
    if (!world.alone()) m.communication->send_gradients(g, m.micro_batch);
}

void await_gradients(Model& m) {
    if (!world.alone()) m.communication->await_gradients();
}

// Called after the update, which clears this rank's shard of the gradients. With ZeRO 1 the other shards hold partial
// sums, which this clears.
void clear_gradients(Model& m) {
    if (m.setup.zero == 1) clear(m.grads.data, m.layout.elements() * size_of(m.grads.dtype));
}

// ---- checkpoints

// values (on rank 0) = a whole tensor of a block with layout y. Each rank holds at least its own shard of its part.
void gather_tensor(float* values, const Model& m, const Layout& y, const float* block, Placement placement,
                   const ParameterRow& row, size_t l) {
    float* staging = m.a.partials();   // unused between steps
    const size_t most = partial_blocks(m.setup.N()) * 4 * m.config.channels;
    for (size_t rank = 0; rank < world.size; rank++) {
        const Shard shard = shard_of(y, row, l, Placement::SHARDED, rank);
        const float* from = block + (placement == Placement::SHARDED ? shard.at : y.place(row, l) + shard.first);
        for (size_t done = 0; done < shard.count; done += most) {
            const size_t n = std::min(most, shard.count - done);
            broadcast(world, world.sent, staging, from + done, n, DType::FP32, rank);
            await_sent(world.sent);
            if (!world.first()) continue;
            TensorPart part = row.part;
            part.rank = rank % part.ranks;
            std::vector<float> piece(n);
            download(piece.data(), staging, n * sizeof(float));
            const float* next = piece.data();
            part.for_each_run(shard.first + done, n, [&](size_t i, size_t count) {
                std::copy_n(next, count, values + part.whole(i));
                next += count;
            });
        }
    }
}
