// Communication between GPUs, and that of a layer with tensor parallelism. Included by train_gpt.cu before the layers.
// distributed.cuh describes the whole.
#pragma once

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
    if (!world.overlap) await_sent(sent);
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
    auto call = [&] { return ncclReduce(x, x, n, nccl_type(dtype), ncclSum, int(root), g.comm, g.stream); };
    send(g, "reduce", sent, 1.0 * n * size_of(dtype), call, updated(x));
}

// out (ranks, n) = all ranks' inp (n)
void all_gather(const Group& g, cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype) {
    auto call = [&] { return ncclAllGather(inp, out, n, nccl_type(dtype), g.comm, g.stream); };
    send(g, "all-gather", sent, 1.0 * n * g.size * size_of(dtype), call, out, inp);
}

// out (n) = inp (n) of the rank `root`
void broadcast(const Group& g, cudaEvent_t sent, void* out, const void* inp, size_t n, DType dtype, size_t root) {
    auto call = [&] { return ncclBroadcast(inp, out, n, nccl_type(dtype), int(root), g.comm, g.stream); };
    send(g, "broadcast", sent, 1.0 * n * size_of(dtype), call, out, inp);
}

// x (n) fp32 = sum (or maximum) of all ranks' x
void over_gpus(float* x, size_t n, ncclRedOp_t operation = ncclSum) {
    if (world.alone()) return;
    all_reduce(world, world.sent, x, n, DType::FP32, operation);
    await_sent(world.sent);
}

// ---- tensor parallelism
// A tensor with memory for all ranks' rows (Tensor::whole) holds this rank's. Other tensors have all rows already.

// Returns this rank's n elements of a tensor of all rows.
template <typename T> T* own_rows(T* all, size_t n) { return all + tensor_ranks.rank * n; }

// Returns the number of this rank's first row, if each has R.
size_t first_row(size_t R) { return tensor_ranks.rank * R; }

// Returns the tensor of all ranks' rows, or t itself if t has all.
Tensor whole(const Tensor& t) {
    Tensor all = t;
    if (!t.whole) return all;
    all.x = std::exchange(all.whole, nullptr);
    all.rows *= tensor_ranks.size;
    return all;
}

// Returns whole(t), which await_gather() fills with all ranks' rows, and their FP8 copy. So each rank's amax is that of
// all rows. Work launched in between overlaps the communication.
Tensor start_gather(const Tensor& t) {
    if (t.whole) all_gather(tensor_ranks, tensor_ranks.sent, t.whole, t.x, t.size(), FLOATX);
    return whole(t);
}
void await_gather(const Tensor& all, const Tensor& t) {
    if (!t.whole) return;
    await_sent(tensor_ranks.sent);
    all.quantise();
}
Tensor gather(const Tensor& t) {
    const Tensor all = start_gather(t);
    await_gather(all, t);
    return all;
}

// t = this rank's rows of the sum of all ranks' whole(t)
void start_sum(const Tensor& t) {
    if (t.whole) reduce_scatter(tensor_ranks, tensor_ranks.sent, t.x, t.whole, t.size(), FLOATX);
}
void await_sum(const Tensor& t) {
    if (t.whole) await_sent(tensor_ranks.sent);
}

// out (N,C) += add (N,C) + b (C), after a sum. cost: bandwidth, reads 2 and writes 1 of N*C
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
void add_residual(const Tensor& out, const Tensor& add, const floatX* b) {
    launch("add_residual", add_residual_kernel, span_blocks(out.size()), BLOCK, 0, updated(out.x), add.x, b, out.size(),
           out.columns);
}

// Sends logits (n) from the tensor rank that has computed them to the others.
void broadcast_logits(floatX* logits, size_t n, size_t from) {
    if (tensor_ranks.alone()) return;
    broadcast(tensor_ranks, tensor_ranks.sent, logits, logits, n, FLOATX, from);
    await_sent(tensor_ranks.sent);
}
