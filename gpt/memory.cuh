// The memory that a run needs, and whether it fits. Included by train_gpt.cu.
//
// plan() predicts exactly what allocate() allocates, because both use the same tables.
#pragma once

struct Plan {
    size_t bytes[std::size(CATEGORY_NAMES)] = {};
    size_t total = 0;

    void add(Category category, size_t n) {
        bytes[static_cast<int>(category)] += n;
        total += n;
    }
};

constexpr size_t CUDA_BYTES = 545 << 20;   // of CUDA itself: context, kernels, cuBLASLt; measured on an H100, CUDA 13.0
constexpr size_t NCCL_BYTES = 512 << 20;   // estimate, of a communicator: depends on the links between the GPUs

Plan plan(const Setup& s) {
    Plan plan;
    const Layout y = layout_of(s);
    const Placement weights = weights_placement(s), grads = grads_placement(s), states = states_placement(s);
    plan.add(Category::WEIGHTS, y.elements(weights) * size_of(s.precision));
    if (weights == Placement::SHARDED) plan.add(Category::BUFFERS, buffer_elements(y) * size_of(s.precision));
    if (s.purpose == Purpose::TRAINING) {
        plan.add(Category::GRADIENTS, y.elements(grads) * size_of(s.grad_dtype));
        if (grads == Placement::SHARDED) plan.add(Category::BUFFERS, buffer_elements(y) * size_of(s.grad_dtype));
        if (has_master(s)) plan.add(Category::MASTER, y.elements(states) * sizeof(float));
        plan.add(Category::ADAM_M, y.elements(states) * sizeof(float));
        plan.add(Category::ADAM_V, layout_of_v(s).elements(states) * sizeof(float));
    }
    Activations nowhere;
    for (const ActivationRow& row : activation_table(nowhere, s)) plan.add(row.category, row.bytes());
    const size_t communicators = s.tensor > 1 ? 3 : s.gpus > 1 ? 1 : 0;
    if (s.on_gpu) plan.add(Category::CUDA, CUDA_BYTES + communicators * NCCL_BYTES);
    return plan;
}

json bytes_record(const Plan& p) {
    json bytes;
    for (size_t i = 0; i < std::size(CATEGORY_NAMES); i++) bytes[CATEGORY_NAMES[i]] = p.bytes[i];
    return bytes;
}

// Returns the largest micro-batch whose plan fits into `bytes`, 0 if none does.
int largest_micro_batch(Setup s, size_t bytes) {
    int fits = 0;
    for (int step = MAX_SEQUENCES; step > 0; step /= 2) {
        s.B = fits + step;
        if (s.B <= MAX_SEQUENCES && s.N() < MAX_ROWS && plan(s).total <= bytes) fits = s.B;
    }
    return fits;
}

struct Memory { size_t available, all; };

Memory memory_now() {
    Memory memory;
    check(cudaMemGetInfo(&memory.available, &memory.all), "cudaMemGetInfo");
    return memory;
}

void require_memory(const Setup& s) {
    const auto [available, all] = memory_now();
    const Plan p = plan(s);
    const size_t needed = p.total - p.bytes[static_cast<int>(Category::CUDA)];   // CUDA's is allocated already
    if (needed <= available) return;
    std::string help;
    for (const auto& [name, mode] : RECOMPUTE_NAMES) {
        Setup other = s;
        other.recompute = mode;
        const int fits = largest_micro_batch(other, available);
        if (fits && s.purpose == Purpose::TRAINING && mode >= s.recompute && help.empty())
            help = format("; --micro-batch %d --recompute %s fits", fits, name);
    }
    if (help.empty()) help = "; no micro-batch fits: a smaller --model or --seq-len is needed";
    throw UserError("out of device memory: this run needs %s, but %s of %s are free on %s%s", size_text(needed).c_str(),
                    size_text(available).c_str(), size_text(all).c_str(), device.properties.name, help.c_str());
}
