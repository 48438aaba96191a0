// Where each parameter is in a block of memory, and which part of it each GPU holds. Included by train_gpt.cu.
//
// Weights, gradients, master weights and the two moments are five blocks of memory with the same layout: group 1 + l
// has the tensors of layer l that tensor parallelism can split (distributed.cuh), group 0 all others: embeddings, the
// LayerNorms, the biases of attproj and fcproj. In each group, parameters with weight decay come first, so a single
// offset separates them from the rest. Each group is padded with zeros to a multiple of the number of ranks that share
// it, and divides into one shard for each of them:
//
//     WHOLE     | group 0             pad | group 1             pad | group 2             pad | ...
//     shards    |   rank 0   |   rank 1   |   rank 0   |   rank 1   |   rank 0   |   rank 1   | ...
//     SHARDED   |   group 0  |   group 1  |   group 2  | ...        this rank's shards
//
// Muon needs whole matrices. So with Muon a layer's group is not divided: the shard of rank l % ranks is all of layer l.
#pragma once

// A block holds all parameters, or this rank's shards of all groups, one after the other.
enum class Placement { WHOLE, SHARDED };

constexpr size_t SHARD_UNIT = 64;   // elements: a shard is a whole number of cache lines (128 bytes)

struct Layout {
    size_t gpus, tensor, rank, layers;
    size_t common = 0, common_decayed = 0;   // elements of group 0, and the number of those with weight decay
    size_t layer = 0, layer_decayed = 0;     // the same for each layer's group
    size_t skipped = 0;                      // elements of each layer's group, the first ones, that are not stored
    bool by_layer = false;                   // Muon: layers are not divided

    size_t elements(Placement p = Placement::WHOLE) const { return part(0, p) + stored(p) * part(1, p); }
    // The number of layers that have space in a block.
    size_t stored(Placement p) const { return p == Placement::WHOLE ? layers : ceil_div(layers, step()); }
    size_t group(size_t g) const { return g == 0 ? common : layer; }
    size_t decayed(size_t g) const { return g == 0 ? common_decayed : layer_decayed; }
    // The ranks that share a group, and a rank's number among them: all ranks share group 0, and those of different
    // tensor groups that hold the same part of a layer share that part.
    size_t ranks(size_t g) const { return g == 0 ? gpus : gpus / tensor; }
    size_t number(size_t g, size_t r) const { return g == 0 ? r : by_layer ? 0 : r / tensor; }
    size_t shard(size_t g) const { return g > 0 && by_layer ? layer : group(g) / ranks(g); }
    size_t step() const { return by_layer ? gpus : 1; }   // from one layer of a rank to the next
    size_t owner(size_t g) const { return (g - 1) % gpus; }
    bool has_shard(size_t g, size_t r) const { return g == 0 || !by_layer || owner(g) == r; }
    size_t part(size_t g, Placement p) const { return p == Placement::WHOLE ? group(g) : shard(g); }
    // The offset of group g in a block.
    size_t begin(size_t g, Placement p) const {
        return g == 0 ? 0 : part(0, p) + (g - 1) / (p == Placement::WHOLE ? 1 : step()) * part(1, p);
    }
    // The offset of this rank's shard of group g.
    size_t own_shard(size_t g, Placement p) const {
        return begin(g, p) + (p == Placement::WHOLE ? number(g, rank) * shard(g) : 0);
    }
    size_t place(const ParameterRow& row, size_t l) const {   // the offset of a tensor in a whole block
        return row.is_split() ? begin(1 + l, Placement::WHOLE) + row.offset - skipped : row.offset + l * row.elements;
    }
};

Layout layout_of(const Config& c, size_t gpus = 1, size_t tensor = 1, size_t rank = 0) {
    Layout y = {gpus, tensor, rank, static_cast<size_t>(c.layers)};
    for (const ParameterRow& row : parameter_table(c, tensor)) {
        const size_t n = row.elements * (row.is_split() ? 1 : row.copies);
        size_t& end = row.is_split() ? y.layer : y.common;
        size_t& decayed = row.is_split() ? y.layer_decayed : y.common_decayed;
        if (row.decays() && decayed < end) throw Failure("parameter_table: %s: expected matrices first", row.name);
        end += n;
        if (row.decays()) decayed = end;
    }
    y.common = ceil_div(y.common, y.ranks(0) * SHARD_UNIT) * y.ranks(0) * SHARD_UNIT;
    y.layer = ceil_div(y.layer, y.ranks(1) * SHARD_UNIT) * y.ranks(1) * SHARD_UNIT;
    return y;
}
Layout layout_of(const Setup& s) {
    Layout y = layout_of(s.config, s.gpus, s.tensor, s.rank);
    y.by_layer = s.optimizer == Optimizer::MUON;
    return y;
}

// Muon updates a layer's parameters with weight decay, its matrices, which have no v.
bool on_muon(const Setup& s, const ParameterRow& row) {
    return s.optimizer == Optimizer::MUON && row.is_split() && row.decays();
}
Layout layout_of_v(const Setup& s) {
    Layout y = layout_of(s);
    if (!y.by_layer) return y;
    y.skipped = y.layer_decayed;   // a layer's matrices, its first elements
    y.layer -= y.skipped;
    y.layer_decayed = 0;
    return y;
}

// Groups first, first + step, ... of a layout.
struct Groups {
    size_t first, count, step;
    size_t stride(const Layout& y, Placement p) const { return (p == Placement::WHOLE ? step : 1) * y.part(first, p); }
};

// Returns the layers of which this rank has a part in a block with this placement.
Groups own_layers(const Layout& y, Placement p) {
    if (p == Placement::WHOLE || !y.by_layer) return {1, y.layers, 1};
    return {std::min(1 + y.rank, y.layers), (y.layers + y.gpus - 1 - y.rank) / y.gpus, y.gpus};
}

std::vector<ParameterRow> parameter_table(const Setup& s) { return parameter_table(s.config, s.tensor, s.rank); }

// What a rank's block holds of its part of a tensor: elements first ... first + count - 1, at offset `at` in the block.
struct Shard { size_t first, count, at; };

Shard shard_of(const Layout& y, const ParameterRow& row, size_t l, Placement placement, size_t rank) {
    if (placement == Placement::WHOLE) return {0, row.elements, y.place(row, l)};
    const size_t g = row.is_split() ? 1 + l : 0, count = y.shard(g), low = y.number(g, rank) * count;
    if (!y.has_shard(g, rank)) return {0, 0, 0};
    const size_t place = y.place(row, l) - y.begin(g, Placement::WHOLE);   // in the group
    const size_t begin = std::max(place, low), end = std::min(place + row.elements, low + count);
    return begin < end ? Shard{begin - place, end - begin, y.begin(g, placement) + begin - low} : Shard{0, 0, 0};
}

// ---- ZeRO

constexpr bool SEPARATE_MASTER = FLOATX != DType::FP32;   // in FP32 the weights are their own master copy
bool has_master(const Setup& s) { return s.precision != DType::FP32 && s.master_weights != MasterWeights::NONE; }

// What each stage of ZeRO shards. Where weights or gradients are sharded, buffers hold those of a few whole layers.
// Weights: the layer in use, and the next one being gathered. Gradients: the layer being computed, and the one above
// being reduced. With FP8 each GPU has all weights in 8 bits, so stage 3 is rejected. Muon needs a
// layer's whole gradients.
int last_stage(const Setup& s) { return s.optimizer == Optimizer::MUON ? 1 : s.matmul == MatmulIn::FLOATX ? 3 : 2; }
Placement weights_placement(const Setup& s) { return s.zero >= 3 ? Placement::SHARDED : Placement::WHOLE; }
Placement grads_placement(const Setup& s) { return s.zero >= 2 ? Placement::SHARDED : Placement::WHOLE; }
Placement states_placement(const Setup& s) { return s.zero >= 1 ? Placement::SHARDED : Placement::WHOLE; }
Placement master_placement(const Setup& s) { return SEPARATE_MASTER ? states_placement(s) : weights_placement(s); }
constexpr size_t BUFFERS = 2;   // layers
size_t weight_copies(int zero, size_t layers) { return zero >= 3 ? std::min(BUFFERS, layers) : layers; }
size_t grad_copies(int zero, size_t layers) { return zero >= 2 ? std::min(BUFFERS, layers) : layers; }

size_t buffer_elements(const Layout& y) { return y.common + std::min(BUFFERS, y.layers) * y.layer; }
