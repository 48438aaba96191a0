// Many GPUs: the communication of a training step and its order. Included by train_gpt.cu. With one GPU the functions
// that train_gpt.cu calls do nothing.
//
// Each GPU has one process (rank). dev/many_gpus.md explains the use.
//
// Data parallelism: each rank computes micro-batches of its own, and a step's gradients are sums over ranks. ZeRO
// shards, in stages, what each rank would otherwise hold whole. states_placement() and its neighbours in sharding.cuh
// decide what.
//
//   --zero  sharded            sent by each of G GPUs, in elements per parameter, times (G - 1) / G
//   0       nothing            2 a step: gradients, summed for all ranks (all-reduce)
//   1       optimizer, master  1 + 1 a step: gradients, each shard summed for its rank (reduce-scatter), and after the
//                              update the new weights (all-gather)
//   2       gradients too      1 a micro-batch + 1 a step: a layer's are summed as soon as backward has computed them
//   3       weights too        1 + 2 in each micro-batch: gathered layer by layer in forward, and in backward again
//
// With Muon, stage 1 sums a layer's gradients for one rank (reduce), which updates and broadcasts its weights.
//
// Tensor parallelism (--tensor-parallel t): t neighbouring ranks, a tensor group, share a micro-batch of N rows. They
// split only attention and the four matmuls of a block: a rank has NH / t heads and 4 C / t columns of the MLP, so
// columns of qkv and fc and rows of attproj and fcproj. Everything else works on R = N / t rows of the residual stream,
// like a rank of data parallelism with a smaller micro-batch:
//
//     rank 0   R rows -- ln1 --+          +-- qkv, attention, attproj of heads 0 ... NH/t - 1 --+       +-- R rows
//     rank 1   R rows -- ln1 --+- gather -+-- qkv, attention, attproj of the next NH/t heads  --+- sum -+-- R rows
//                              N rows of ln1 for each rank      a summand of N rows from each rank
//
// The MLP likewise. gather() is an all-gather, start_sum() a reduce-scatter; backward replaces each by the other,
// and gathers ln1 and ln2 again for the gradients of weights. In elements per layer and micro-batch, a rank sends
// 10 N C (t - 1) / t; with --recompute full 13.
//
// Communication runs on streams of its own while device.stream computes.
// source  Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5;
//         Shoeybi et al. 2019, "Megatron-LM"; Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
//         Transformer Models", section 4.2
#pragma once

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

void connect(Model& m) {
    if (!world.alone()) m.communication = std::make_shared<Communication>(m);
}

// Called before the first layer of a forward pass.
void begin_forward(Model& m, const ForwardPass& pass) {
    if (pass.in_fp8 && m.setup.fp8_scaling == Fp8Scaling::CURRENT)
        fp8_scales<Fp8Step::RESET_AMAX>(m.a.fp8_scales(), scale_count(m));
    if (!world.alone()) m.communication->need_weights(0, 1);
}

// Called before the weights of group g, a layer's, are used, with the group that is needed next.
void need_weights(Model& m, size_t g, size_t next, const ForwardPass& pass) {
    if (!world.alone()) m.communication->need_weights(g, next);
    if (pass.in_fp8) need_fp8_weights(m, g - 1);
}

void weights_changed(Model& m) {
    if (!world.alone()) m.communication->weights_changed();
    fp8_weights_changed(m);
}

// Called after the update.
void end_step(Model& m) {
    push_amaxes(m);
    weights_changed(m);
}

void begin_gradients(Model& m, size_t g) {
    if (!world.alone()) m.communication->begin_gradients(g);
}

// Called when group g's gradients of this micro-batch are complete: here the sum of gradients over GPUs starts.
void send_gradients(Model& m, size_t g, MicroBatch which) {
    if (!world.alone()) m.communication->send_gradients(g, which);
}

void send_all_gradients(Model& m) {
    for (size_t g = 0; g <= m.layout.layers; g++) send_gradients(m, g, MicroBatch::LAST);
}

// Later work waits for the sums that send_gradients() started.
void await_gradients(Model& m) {
    if (!world.alone()) m.communication->await_gradients();
}

// Called after the update, which clears this rank's shard of the gradients. With ZeRO 1 the other shards hold partial
// sums, which this clears.
void clear_gradients(Model& m) {
    if (m.setup.zero == 1) clear(m.grads.data, m.layout.elements() * size_of(m.grads.dtype));
}

// ---- what this rank updates

// Returns the offset in a block of the part of group g that this rank updates: the whole group or its shard.
size_t update_begin(const Model& m, size_t g, Placement placement) {
    const bool whole = states_placement(m.setup) == Placement::WHOLE;
    return whole ? m.layout.begin(g, placement) : m.layout.own_shard(g, placement);
}

// Returns the parameters of group 0, or of some layers, that this rank updates by AdamW: without Muon's matrices, the
// first elements of a layer.
Slice adamw_slice(Model& m, const Groups& own) {
    const Layout &y = m.layout, v = layout_of_v(m.setup);
    const Placement part = states_placement(m.setup), weights = weights_placement(m.setup);
    const Placement master = master_placement(m.setup), grads = grads_placement(m.setup);
    const size_t g = own.first, n = v.part(g, part), skipped = y.part(g, part) - n;
    auto at = [&](Placement placement) { return update_begin(m, g, placement) + skipped; };
    const size_t before = part == Placement::WHOLE ? 0 : y.number(g, y.rank) * n;
    const size_t decayed = v.decayed(g) > before ? std::min(v.decayed(g) - before, n) : 0;
    auto stride = [&](Placement placement) { return own.stride(y, placement); };
    return {m.weights + at(weights), m.master ? m.master + at(master) : nullptr, grad_at(m, at(grads)),
            m.adam_m + at(part), m.adam_v + v.begin(g, part), n, decayed, unsigned(own.count),
            {stride(weights), stride(master), stride(grads), stride(part), n}};
}

// Returns all slices: group 0, the layers, then Muon's matrices one by one, with Q, K and V as three.
std::vector<Slice> update_slices(Model& m) {
    const Groups own = own_layers(m.layout, states_placement(m.setup));
    std::vector<Slice> slices = {adamw_slice(m, {0, 1, 1})};
    if (own.count > 0) slices.push_back(adamw_slice(m, own));
    for (const ParameterRow& row : parameter_table(m.w, m.config)) {
        const size_t pieces = row.tensor == &m.w.qkvw ? 3 : 1, columns = row.shape.back() / pieces;
        for (size_t i = 0; on_muon(m.setup, row) && i < own.count * pieces; i++) {
            const size_t g = own.first + i / pieces * own.step, offset = row.offset + i % pieces * columns;
            auto at = [&](Placement placement) { return m.layout.begin(g, placement) + offset; };
            slices.push_back({m.weights + at(Placement::WHOLE), m.master + at(master_placement(m.setup)),
                              grad_at(m, at(Placement::WHOLE)), m.adam_m + at(states_placement(m.setup)), nullptr, 0, 0,
                              1, {}, {row.shape[0], columns, row.shape[1]}});
        }
    }
    return slices;
}

// Returns the gradients whose squares this rank sums: its shards, so the norm is the same in every ZeRO stage.
GradientRanges own_gradients(const Model& m) {
    const Layout& y = m.layout;
    const Placement grads = grads_placement(m.setup);
    const Groups own = own_layers(y, Placement::SHARDED);
    return {grad_at(m, y.own_shard(0, grads)), y.shard(0), grad_at(m, y.own_shard(own.first, grads)), y.shard(1),
            unsigned(own.count), own.stride(y, grads),
            norm_blocks(y.shard(0), y.shard(1), y.stored(Placement::SHARDED))};
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
