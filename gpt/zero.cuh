// Data parallelism and ZeRO: what is sent between GPUs, and when. Included by train_gpt.cu, whose section "many GPUs"
// says what each stage shares out.
#pragma once

// ---- what is sent

// What computes from now on waits for what was sent up to the event.
void await_sent(cudaEvent_t event) { check(cudaStreamWaitEvent(device.stream, event, 0), "cudaStreamWaitEvent"); }

// Hands call() to ranks.stream, behind all that computes now, and records `sent` behind it. What computes later waits
// for it by await_sent() only, or where nothing may overlap. bytes: in all, of which a GPU sends (R - 1) / R.
template <typename F, typename... Memory>
void send(const char* name, cudaEvent_t sent, double bytes, F call, const Memory&... memory) {
    if (device.tuning) return;
    check(cudaEventRecord(ranks.computed, device.stream), "cudaEventRecord");
    check(cudaStreamWaitEvent(ranks.stream, ranks.computed, 0), "cudaStreamWaitEvent");
    on_stream(name, ranks.stream, call, memory...);
    check(cudaEventRecord(sent, ranks.stream), "cudaEventRecord");
    ranks.bytes_sent += bytes * (ranks.count - 1) / ranks.count;
    if (ranks.overlap == Overlap::OFF) await_sent(sent);
}

// x (n) = the sum of all ranks' x, or the largest
void all_reduce(cudaEvent_t sent, void* x, size_t n, DType dtype, ncclRedOp_t of_all = ncclSum) {
    send("all-reduce", sent, 2.0 * n * size_of(dtype), [&] {
        check(ncclAllReduce(x, x, n, nccl_type(dtype), of_all, ranks.comm, ranks.stream), "ncclAllReduce");
    }, updated(x));
}

// out (n) = the sum of all ranks' inp (ranks, n), of which this rank's part
void reduce_scatter(cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype) {
    send("reduce-scatter", sent, 1.0 * n * ranks.count * size_of(dtype), [&] {
        check(ncclReduceScatter(inp, out, n, nccl_type(dtype), ncclSum, ranks.comm, ranks.stream),
              "ncclReduceScatter");
    }, out, inp);
}

// out (ranks, n) = all ranks' inp (n)
void all_gather(cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype) {
    send("all-gather", sent, 1.0 * n * ranks.count * size_of(dtype), [&] {
        check(ncclAllGather(inp, out, n, nccl_type(dtype), ranks.comm, ranks.stream), "ncclAllGather");
    }, out, inp);
}

// out (n) = inp (n) of the rank `root`
void broadcast(cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype, size_t root) {
    send("broadcast", sent, 1.0 * n * size_of(dtype), [&] {
        check(ncclBroadcast(inp, out, n, nccl_type(dtype), root, ranks.comm, ranks.stream), "ncclBroadcast");
    }, out, inp);
}

// x (n) fp32 = the sum of all ranks' x, or the largest
void over_gpus(float* x, size_t n, ncclRedOp_t of_all) {
    if (ranks.alone()) return;
    all_reduce(ranks.sent, x, n, DType::FP32, of_all);
    await_sent(ranks.sent);
}
void sum_over_gpus(float* x, size_t n) { over_gpus(x, n, ncclSum); }
void max_over_gpus(float* x, size_t n) { over_gpus(x, n, ncclMax); }

// ---- weights, gathered ahead

// Group 0 has a place of its own, layers take turns in `copies`.
size_t slot_of(size_t g, size_t copies) { return g == 0 ? 0 : 1 + (g - 1) % copies; }
size_t slot_begin(const Layout& y, size_t slot) { return slot == 0 ? 0 : y.outside + (slot - 1) * y.layer; }

void make_sending(Model& m) {
    if (ranks.alone()) return;
    Sending& t = m.sending;
    t.holds.assign(1 + m.w.qkvw.copies, NO_GROUP);
    t.gathered.resize(t.holds.size());
    t.reduced.resize(1 + m.g.qkvw.copies);
    for (auto* events : {&t.gathered, &t.reduced})
        for (cudaEvent_t& event : *events)
            check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
}

void gather_weights(Model& m, size_t g) {
    const Layout& y = m.layout;
    if (g > y.layers || device.tuning) return;
    const size_t slot = slot_of(g, m.w.qkvw.copies);
    if (m.sending.holds[slot] == g) return;
    m.sending.holds[slot] = g;
    const Kept kept = weights_kept(m.setup);
    floatX* whole = kept == Kept::WHOLE ? m.weights : m.weight_buffers;
    all_gather(m.sending.gathered[slot], whole + slot_begin(y, slot), m.weights + y.mine(g, kept), y.slice(g), FLOATX);
}

// Before group g's weights are used, and then those of `next`, for which there is time.
void need_weights(Model& m, size_t g, size_t next) {
    if (ranks.alone()) return;
    ranks.alive();
    if (m.setup.zero == 0) return;
    gather_weights(m, g);
    gather_weights(m, next);
    if (device.tuning) return;
    await_sent(m.sending.gathered[slot_of(g, m.w.qkvw.copies)]);
    if (g > 0) need_fp8_weights(m, g - 1);
}

// After the update: what was gathered is old. Nothing is on its way then, as between steps ranks talk by MPI, too.
void weights_changed(Model& m) {
    if (m.setup.zero > 0) std::fill(m.sending.holds.begin(), m.sending.holds.end(), NO_GROUP);
    fp8_weights_changed(m);
}

// The weights are the master weights, rounded: for what this rank updates, and then for all.
void master_changed(Model& m) {
    const Layout& y = m.layout;
    const Kept part = states_kept(m.setup), weights = weights_kept(m.setup), master = master_kept(m.setup);
    for (size_t g = 0; SEPARATE_MASTER && g <= y.layers; g++) {
        auto at = [&](Kept kept) { return part == Kept::WHOLE ? y.begin(g, kept) : y.mine(g, kept); };
        round_weights(m.weights + at(weights), m.master + at(master), y.part(g, part));
    }
    weights_changed(m);
}

// ---- gradients, sent as they are done

Grad grad_at(const Model& m, size_t element) {
    return {static_cast<char*>(m.grads.data) + element * size_of(m.grads.dtype), m.grads.dtype};
}

// Before something is added to group g's gradients. In a buffer they begin as zeros and, in this rank's slice, what it
// has summed up to now: then the sum over ranks is that of all micro-batches.
void begin_gradients(Model& m, size_t g) {
    if (ranks.alone() || grads_kept(m.setup) == Kept::WHOLE || device.tuning) return;
    const Layout& y = m.layout;
    const size_t slot = slot_of(g, m.g.qkvw.copies), size = size_of(m.grads.dtype), slice = y.slice(g) * size;
    char* buffer = static_cast<char*>(m.grad_buffers.data) + slot_begin(y, slot) * size;
    const void* so_far = grad_at(m, y.mine(g, Kept::SLICES)).data;
    await_sent(m.sending.reduced[slot]);
    clear(buffer, y.group(g) * size);
    on_stream("copy slice", device.stream, [&] {
        check(cudaMemcpyAsync(buffer + y.rank * slice, so_far, slice, cudaMemcpyDeviceToDevice, device.stream),
              "cudaMemcpyAsync");
    }, buffer, so_far);
}

// Nothing more will be added to group g's gradients in this micro-batch.
void send_gradients(Model& m, size_t g) {
    if (ranks.alone()) return;
    const Layout& y = m.layout;
    const size_t slot = slot_of(g, m.g.qkvw.copies), size = size_of(m.grads.dtype);
    const cudaEvent_t sent = m.sending.reduced[slot];
    if (grads_kept(m.setup) == Kept::SLICES) {
        const void* buffer = static_cast<char*>(m.grad_buffers.data) + slot_begin(y, slot) * size;
        return reduce_scatter(sent, grad_at(m, y.mine(g, Kept::SLICES)).data, buffer, y.slice(g), m.grads.dtype);
    }
    if (m.sending.micro_batch == MicroBatch::ONE_OF_SEVERAL) return;
    void* whole = grad_at(m, y.begin(g, Kept::WHOLE)).data;
    if (m.setup.zero == 0) all_reduce(sent, whole, y.group(g), m.grads.dtype);
    else reduce_scatter(sent, grad_at(m, y.mine(g, Kept::WHOLE)).data, whole, y.slice(g), m.grads.dtype);
}

void await_gradients(Model& m) {
    if (ranks.alone()) return;
    for (const cudaEvent_t event : m.sending.reduced) await_sent(event);
}

// After the update, which leaves zeros in what it has read: with ZeRO 1 the other ranks' slices hold parts of sums.
void forget_gradients(Model& m) {
    if (m.setup.zero == 1) clear(m.grads.data, m.layout.elements() * size_of(m.grads.dtype));
}

// ---- checkpoints

// values (of the first rank): a whole tensor of a block of which each rank has its own slices, at least.
void download_tensor(float* values, const Model& m, const float* block, Kept kept, const ParameterRow& row, size_t l) {
    const Layout& y = m.layout;
    ranks.alive();
    if (!block) {   // there is no master copy: the weights
        std::vector<floatX> exact(row.elements);
        download(exact.data(), m.weights + y.place(row, l), row.elements * sizeof(floatX));
        std::copy(exact.begin(), exact.end(), values);
        return;
    }
    if (m.setup.zero == 0) {
        if (ranks.first()) download(values, block + y.place(row, l), row.elements * sizeof(float));
        return;
    }
    float* staging = m.a.partials();   // idle between steps
    const size_t most = partial_blocks(m.setup.N()) * 4 * m.config.channels;
    for (size_t rank = 0; rank < ranks.count; rank++) {
        const Share share = share_of(y, row, l, Kept::SLICES, rank);
        const float* from = block + (kept == Kept::SLICES ? share.at : y.place(row, l) + share.first);
        for (size_t done = 0; done < share.count; done += most) {
            const size_t n = std::min(most, share.count - done);
            broadcast(ranks.sent, staging, from + done, n, DType::FP32, rank);
            await_sent(ranks.sent);
            if (ranks.first()) download(values + share.first + done, staging, n * sizeof(float));
        }
    }
}
