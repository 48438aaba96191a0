// Data of a run, and micro-batches to the device. Included by train_gpt.cu; gpt/data.h reads files and windows.
#pragma once

struct TrainData {
    Tokens train, val;
    Text text{"", BYTE_VOCAB};
    int bos = -1;   // the model's token for the start of a text; -1: it has none
};

TrainData open_data(const Options& o) {
    if (o.data.empty()) throw UserError("train needs --data PATTERN: text or .bin shards of tokens");
    const Tokens train(o.data);
    try {
        return {train, o.val_data.empty() ? Tokens() : Tokens(o.val_data)};
    } catch (const UserError& error) {
        throw UserError("--val-data: %s", error.what());
    }
}

constexpr size_t SOME = 1 << 20;   // tokens, to guess what all are

// Returns the token that separates documents, for a new model: --eot; 255 for bytes, which no text has; <|endoftext|>
// if the shards may be GPT-2's, whose tokens end with it; otherwise the last of V tokens.
int end_of_text(const Options& o, const Tokens& train, int V) {
    constexpr int OF_GPT2 = 50256;
    if (o.eot >= V) throw UserError("--eot %d: expected a token below the vocabulary of %d", o.eot, V);
    if (o.eot >= 0 && train.bytes_only()) throw UserError("--eot %d: expected .bin shards, found text", o.eot);
    if (o.eot >= 0) return o.eot;
    if (train.bytes_only()) return BYTE_VOCAB - 1;
    return V > OF_GPT2 && train.largest(SOME) <= OF_GPT2 ? OF_GPT2 : V - 1;
}

// Tokenizes text for the model in `dir`, or for a new one if dir is empty, and splits off the validation data.
void divide_data(TrainData& data, const Options& o, const std::string& dir, const Config& c) {
    const WatchdogPause tokenizing_may_take_long;
    const bool reads_text = data.train.bytes_only() || data.val.bytes_only() || o.sample_every > 0;
    data.text = reads_text ? Text(dir, c.vocab) : text_if_any(o.eval_every > 0 ? dir : "", c.vocab);   // bits per byte
    data.bos = dir.empty() ? end_of_text(o, data.train, c.vocab) : bos_token(dir, c.vocab);
    if (!dir.empty() && o.given.count("--eot") && o.eot != data.bos)
        throw UserError("--eot %d: differs from the bos_token_id in %s/config.json, which --from keeps; leave out "
                        "--eot", o.eot, dir.c_str());
    if (dir.empty() && o.eot < 0 && !data.train.bytes_only() && data.train.largest(SOME) < data.bos)
        printf("note       the end-of-text token is %d, which the data seems not to have; --eot N changes it\n",
               data.bos);
    for (Tokens* tokens : {&data.train, &data.val}) tokens->tokenize(data.text);
    if (o.val_data.empty() && o.eval_every > 0) data.val = data.train.split_tail(o.val_fraction);
}

void require_window(const Tokens& tokens, size_t T) {
    if (tokens.windows(Windows::WHOLE, T) == 0)
        throw UserError("%s: expected at least %zu tokens for --seq-len %zu, found %zu tokens",
                        tokens.pieces().empty() ? "--data" : tokens.pieces()[0].file->path().c_str(), T + 1, T,
                        tokens.count());
}

// Writes order (N), the positions of inputs (N) sorted by token, for embedding's backward: a counting sort.
void sort_positions(int* order, const int* inputs, size_t N, int V) {
    std::vector<int> at(V + 1, 0);
    for (size_t n = 0; n < N; n++) at[inputs[n] + 1]++;
    std::partial_sum(at.begin(), at.end(), at.begin());
    for (size_t n = 0; n < N; n++) order[at[inputs[n]]++] = static_cast<int>(n);
}

// Copies each micro-batch to the device while the previous one is in use: two slots in pinned host memory and on the
// device. A window is a function of (seed, its number), so a run can resume at any step.
class Loader {
public:
    Loader(const Model& m, const Tokens& tokens, Shuffle shuffle, uint64_t seed, uint64_t first_window)
        : m_(m), tokens_(tokens), windows_(shuffle == Shuffle::YES ? Windows::ANYWHERE : Windows::WHOLE),
          seed_(splitmix64(seed)), next_window_(first_window + m.setup.rank / m.setup.tensor * m.setup.B) {
        const size_t N = m.setup.N();
        for (Slot& slot : slots_) {
            check(cudaMallocHost(reinterpret_cast<void**>(&slot.host), 3 * N * sizeof(int)), "cudaMallocHost");
            check(cudaEventCreateWithFlags(&slot.copied, cudaEventDisableTiming), "cudaEventCreate");
            check(cudaEventCreateWithFlags(&slot.used, cudaEventDisableTiming), "cudaEventCreate");
        }
        send();
    }
    Loader(const Loader&) = delete;
    ~Loader() {
        cudaStreamSynchronize(device.copies);
        for (Slot& slot : slots_) {
            cudaFreeHost(slot.host);
            cudaEventDestroy(slot.copied);
            cudaEventDestroy(slot.used);
        }
    }

    // Returns the current batch. Work launched from now on waits for its copy.
    Batch current() {
        Slot& slot = slots_[now_];
        check(cudaStreamWaitEvent(device.stream, slot.copied, 0), "cudaStreamWaitEvent");
        return slot.batch;
    }
    // Called after work on the current batch has been launched: starts the copy of the next one, which becomes current.
    void advance() {
        check(cudaEventRecord(slots_[now_].used, device.stream), "cudaEventRecord");
        now_ = 1 - now_;
        send();
    }

private:
    struct Slot {
        int* host;   // inputs (N), targets (N), order (N)
        cudaEvent_t copied, used;
        Batch batch;
    };

    void send() {
        Slot& slot = slots_[now_];
        const size_t B = m_.setup.B, T = m_.setup.T, N = m_.setup.N(), R = m_.setup.rows();
        progress("wait for the device");
        check(cudaEventSynchronize(slot.copied), "cudaEventSynchronize");   // the slot's host memory is free
        int *inputs = slot.host, *targets = inputs + N, *order = targets + N;
        for (size_t b = 0; b < B; b++, next_window_++) {
            const bool random = windows_ == Windows::ANYWHERE;
            const uint64_t pick = random ? splitmix64(seed_ ^ splitmix64(next_window_)) : next_window_;
            tokens_.read(inputs + b * T, targets + b * T, windows_, pick % tokens_.windows(windows_, T), T,
                         m_.config.vocab);
        }
        next_window_ += (m_.setup.data() - 1) * B;   // skips the windows of other tensor groups
        inputs = own_rows(inputs, R);
        targets = own_rows(targets, R);
        sort_positions(order, inputs, R, m_.config.vocab);
        check(cudaStreamWaitEvent(device.copies, slot.used, 0), "cudaStreamWaitEvent");   // its device memory is free
        auto transfer = [&](const Buffer<int>& to, const int* from) {
            on_stream("copy to device", device.copies, [&] {
                check(cudaMemcpyAsync(to(now_), from, R * sizeof(int), cudaMemcpyHostToDevice, device.copies),
                      "cudaMemcpyAsync");
            });
            return to(now_);
        };
        slot.batch = {transfer(m_.a.inputs, inputs), transfer(m_.a.targets, targets), transfer(m_.a.order, order)};
        check(cudaEventRecord(slot.copied, device.copies), "cudaEventRecord");
    }

    const Model& m_;
    const Tokens& tokens_;
    Windows windows_;
    uint64_t seed_, next_window_;
    Slot slots_[2] = {};
    int now_ = 0;
};
