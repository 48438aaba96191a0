// What signals mean to a training run: that it ends after its step, with a checkpoint. Included by train_gpt.cu.

#pragma once

static volatile sig_atomic_t stop_requested = 0;   // the signal's number

// Ctrl-C ends the run after the step, a second one at once; so does SIGTERM. A terminal that is closed (it may say so
// twice) and output that nobody reads end it after the step, too. The handler's stack is that of catch_lost_pages().
void catch_signals() {
    for (int number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) {
        struct sigaction action = {}, before;
        action.sa_handler = [](int received) { stop_requested = received; };
        action.sa_flags = SA_ONSTACK | SA_RESTART | (number == SIGINT || number == SIGTERM ? SA_RESETHAND : 0);
        sigaction(number, nullptr, &before);
        if (number != SIGHUP || before.sa_handler != SIG_IGN) sigaction(number, &action, nullptr);   // nohup ignores it
    }
    signal(SIGXFSZ, SIG_IGN);   // a file that may grow no more (ulimit -f): write() says so
}

// What was printed has been written, or this throws. Output that nobody reads any more has ended a run well.
void require_output() {
    const std::string reason = fflush(stdout) != 0 ? format(": %s", strerror(errno)) : "";   // it may be long past
    if (ferror(stdout) && stop_requested != SIGPIPE) throw Failure("standard output: writing failed%s", reason.c_str());
}
