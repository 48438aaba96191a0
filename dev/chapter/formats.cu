// What 16 bits make of a step's numbers: part 9 of make chapter. It takes train's options,
//
//     formats --data FILE --steps N --total-batch TOKENS ...
//
// and prints one JSON object: how far gradients that are summed in BF16 are from those that are summed in FP32, after
// 1, 2, 4 ... micro-batches up to --total-batch; and, after N steps, in which powers of two the values of the next one
// lie, and how many of the 16-bit weights that have a master copy it leaves as they are.

#define TESTING   // train_gpt.cu without its main
#include "../../train_gpt.cu"

typedef std::vector<float> Floats;

template <typename T> Floats values_of(const T* from, size_t n) {
    std::vector<T> values(n);
    download(values.data(), from, n * sizeof(T));
    return Floats(values.begin(), values.end());
}

Floats gradients_of(const Model& m) {
    Floats values;
    with_type(m.grads, [&](auto* g) { values = values_of(g, m.layout.elements()); });
    return values;
}

double norm_of(const Floats& a) {
    double squares = 0;
    for (float x : a) squares += double(x) * x;
    return sqrt(squares);
}

// |a - b| / |b|
double distance(const Floats& a, const Floats& b) {
    Floats difference(a.size());
    for (size_t i = 0; i < a.size(); i++) difference[i] = a[i] - b[i];
    return norm_of(difference) / norm_of(b);
}

// ==== sums of gradients ======================================================

// The same weights, the same micro-batches. Each one's gradients are added to what is there: nothing else differs.
json sums(const Options& o, const TrainData& data, Setup s) {
    const long most = accumulation_steps(o, s);
    Model exact, rounded;
    for (Model* m : {&exact, &rounded}) {
        s.grad_dtype = m == &exact ? DType::FP32 : DType::BF16;
        allocate(*m, s);
        init_parameters(*m, o.seed);
        clear(m->grads.data, m->layout.elements() * size_of(s.grad_dtype));
    }
    Loader of_exact(exact, data.train, o.shuffle, o.seed, 0), of_rounded(rounded, data.train, o.shuffle, o.seed, 0);
    json records;
    for (long count = 1; count <= most; count++) {
        micro_step(exact, of_exact.current(), s.N());   // of a fixed scale: sums of 1, 2 ... are those on the way
        micro_step(rounded, of_rounded.current(), s.N());
        of_exact.advance();
        of_rounded.advance();
        if (count & (count - 1)) continue;   // no power of two
        const Floats sum = gradients_of(exact);
        Floats once(sum.size());
        for (size_t i = 0; i < sum.size(); i++) once[i] = static_cast<float>(floatX(sum[i]));
        records.push_back({{"micro_batches", count}, {"error", distance(gradients_of(rounded), sum)},
                           {"rounded_once", distance(once, sum)}});
    }
    return records;
}

// ==== where values lie =======================================================

// Of some values: which part is zero, and which part lies from each power of two up to twice that.
json spread(const Floats& values) {
    std::map<int, size_t> counts;
    size_t zeros = 0;
    for (float x : values) {
        if (x == 0) zeros++;
        else counts[std::ilogb(x)]++;
    }
    json powers = json::object();
    for (const auto& [power, count] : counts) powers[std::to_string(power)] = double(count) / values.size();
    return {{"zeros", double(zeros) / values.size()}, {"powers", powers}};
}

// Activations and their gradients are those of the first layer, through which backward has gone last.
json values(const Options& o, const TrainData& data, const Setup& s) {
    Model m;
    allocate(m, s);
    init_parameters(m, o.seed);
    Loader loader(m, data.train, o.shuffle, o.seed, 0);
    const size_t n = m.layout.elements();
    Floats weights, master, gradients, activations, their_gradients, steps;
    json shares;
    for (long step = 0; step <= o.steps; step++) {
        micro_step(m, loader.current(), s.N());
        loader.advance();
        gradients = gradients_of(m);
        weights = values_of(m.weights, n);
        master = values_of(m.master, n);
        update(m, adamw_settings(o, step));
        const Floats weights_after = values_of(m.weights, n), master_after = values_of(m.master, n);
        size_t same = 0, moved = 0;
        steps.assign(n, 0);
        for (size_t i = 0; i < n; i++) {
            steps[i] = master_after[i] - master[i];
            moved += steps[i] != 0;
            same += steps[i] != 0 && weights_after[i] == weights[i];
        }
        shares.push_back(double(same) / std::max(moved, size_t{1}));
    }
    auto add = [&](Floats& to, const Tensor<floatX>& tensor, size_t elements) {
        const Floats more = values_of(tensor(0), elements);
        to.insert(to.end(), more.begin(), more.end());
    };
    const size_t N = s.N(), C = s.config.channels;
    const Activations& a = m.a;
    for (const auto* tensor : {&a.res1, &a.ln1, &a.att, &a.res2, &a.ln2}) add(activations, *tensor, N * C);
    for (const auto* tensor : {&a.fc, &a.gelu}) add(activations, *tensor, 4 * N * C);
    add(activations, a.qkv, 3 * N * C);
    for (const auto* tensor : {&a.dres, &a.datt}) add(their_gradients, *tensor, N * C);
    add(their_gradients, a.dqkv, 3 * N * C);
    add(their_gradients, a.dfc, 4 * N * C);
    return {{"tokens", N},
            {"unchanged", shares},
            {"spread", {{"activations", spread(activations)}, {"weights", spread(weights)},
                        {"gradients of weights", spread(gradients)},
                        {"gradients of activations", spread(their_gradients)},
                        {"updates of weights", spread(steps)}}}};
}

// ==== main ===================================================================

int main(int argc, char** argv) {
    try {
        const Options o = parse_options(TRAIN, "train", {argv + 1, argv + argc});
        if (FLOATX != DType::BF16) throw UserError("built in %s, expected bf16", name_of(FLOATX));
        TrainData data = open_data(o);
        const Config config = config_from_options(o, BYTE_VOCAB);
        divide_data(data, o, "", config);
        open_device(o.tensor_cores, o.threads);
        const Setup setup = make_setup(o, config, Purpose::TRAINING, memory_now().available);
        const json record = {{"precision", name_of(FLOATX)}, {"device", device.properties.name},
                             {"sums", sums(o, data, setup)}, {"values", values(o, data, setup)}};
        printf("%s\n", record.dump().c_str());
        return 0;
    } catch (const UserError& error) {
        fprintf(stderr, "formats: %s\n", error.what());
        return 2;
    } catch (const std::exception& error) {
        fprintf(stderr, "formats: %s\n", error.what());
        return 1;
    }
}
