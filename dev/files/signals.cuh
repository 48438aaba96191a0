// What signals mean to a training run: that it ends after its step, with a checkpoint; or that a file has lost its end.
// Included by train_gpt.cu.

#pragma once

static volatile sig_atomic_t stop_requested = 0;

// A file that is cut off while it is mapped has no pages any more where its end was. In training, zeros take the
// place of one that is asked for, so that the reader of a window can say which file it was, and the run end well.
static volatile sig_atomic_t page_lost = 0;

void replace_lost_page(int, siginfo_t* info, void*) {
    const size_t page = sysconf(_SC_PAGESIZE), at = reinterpret_cast<size_t>(info->si_addr) / page * page;
    const bool replaced = info->si_code == BUS_ADRERR &&
                          mmap(reinterpret_cast<void*>(at), page, PROT_READ,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
    if (replaced) page_lost = 1;
    else signal(SIGBUS, SIG_DFL);   // something else: it comes again, and ends the program
}

// Ctrl-C ends the run after the step, a second one at once; so does SIGTERM. A terminal that is closed (it may say so
// twice) and output that nobody reads end it after the step, too. On a stack of its own: on a CPU a matmul of oneDNN
// runs with the stack pointer inside of its heap buffer, where the handler's frame would do damage.
void catch_signals() {
    static char signal_stack[64 << 10];
    const stack_t stack = {signal_stack, 0, sizeof(signal_stack)};
    if (sigaltstack(&stack, nullptr) != 0) throw Failure("sigaltstack: %s", strerror(errno));
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
        struct sigaction action = {}, before;
        action.sa_handler = [](int) { stop_requested = 1; };
        action.sa_flags = SA_ONSTACK | SA_RESTART | (number == SIGINT || number == SIGTERM ? SA_RESETHAND : 0);
        sigaction(number, nullptr, &before);
        if (number != SIGHUP || before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);   // nohup ignores it
    }
    signal(SIGXFSZ, SIG_IGN);   // a file that may grow no more (ulimit -f): write() says so
    struct sigaction lost = {};
    lost.sa_sigaction = replace_lost_page;
    lost.sa_flags = SA_ONSTACK | SA_SIGINFO;
    sigaction(SIGBUS, &lost, nullptr);
}
