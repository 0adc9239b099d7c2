// SPDX-License-Identifier: Apache-2.0

package mpich

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/xspin/xspin/netns/testbed"
)

// An openMPI is Open MPI's launcher with its ranks. These cannot be started without it, as
// MPICH's can: they are its children, and find each other by a server in it. It is at the
// sender's end of the lab, and the receiver reaches its server through the lab.
type openMPI struct {
	cmd      *exec.Cmd
	launcher bytes.Buffer // its stderr
	stderr   []string     // files, of ranks
	commands []*os.File   // our ends of pipes to the ranks' stdin
	answers  []*os.File   // and of those from their stdout
	theirs   []*os.File   // the other ends of both
	ended    chan struct{}
	err      error // of the launcher, when ended is closed
}

// startOpenMPI starts a program's ranks. Stdin and stdout of each are pipes of ours, which it
// opens by our descriptors' names, since a launcher has one of each for all. Files are in a
// directory, which must stay until they have ended.
func startOpenMPI(program, dir string, cfg PairConfig) (_ *openMPI, ranks []*rank, err error) {
	o := &openMPI{ended: make(chan struct{})}
	defer func() {
		if err != nil {
			closeAll(o.commands, o.answers, o.theirs)
		}
	}()
	// A program for each rank, with ":" between them, has mpirun 5.0.7 crash.
	script, words := "case $OMPI_COMM_WORLD_RANK in", []string{program}
	for i, r := range places(cfg) {
		stdin, commands, err := os.Pipe()
		if err != nil {
			return nil, nil, err
		}
		o.commands, o.theirs = append(o.commands, commands), append(o.theirs, stdin)
		answers, stdout, err := os.Pipe()
		if err != nil {
			return nil, nil, err
		}
		o.answers, o.theirs = append(o.answers, answers), append(o.theirs, stdout)
		stderr := filepath.Join(dir, r.what+".stderr")
		o.stderr = append(o.stderr, stderr)
		ranks = append(ranks, newRank(r.what, commands, answers, o.kill, func() error { return o.wait(stderr) }))
		pin := ""
		if r.cpu >= 0 {
			// If there is no such CPU, this says so, and not only the launcher.
			if err := testbed.OnCPU(r.cpu, func() error { return nil }); err != nil {
				return nil, nil, fmt.Errorf("start %s: %w", r.what, err)
			}
			pin = fmt.Sprintf("taskset -c %d ", r.cpu)
		}
		script += fmt.Sprintf(` %d) exec nsenter --net="$%d" %s"$0" </proc/%[4]d/fd/%[5]d >/proc/%[4]d/fd/%[6]d 2>"$%[7]d" ;;`,
			i, len(words), pin, os.Getpid(), stdin.Fd(), stdout.Fd(), len(words)+1)
		words = append(words, r.port.NS.Path(), stderr)
	}
	o.cmd = exec.Command("mpirun.openmpi", append([]string{
		"--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", strconv.Itoa(len(ranks)), "sh", "-c", script + " esac",
	}, words...)...)
	o.cmd.Env = environ(
		"TMPDIR="+dir,                               // for its own files
		"OMPI_MCA_pml=ob1", "OMPI_MCA_btl=tcp,self", // not shared memory
		"OMPI_MCA_btl_tcp_if_include="+cfg.Lab.Host.Addr.Masked().String(),
		"OMPI_MCA_mpi_yield_when_idle=0", // as MPICH
		"PMIX_MCA_ptl_base_if_include="+cfg.Lab.Host.Device, "PMIX_MCA_ptl_base_remote_connections=1",
		"GOMAXPROCS=1", // of the GEMM's runtime
	)
	o.cmd.Stderr = &o.launcher
	o.cmd.WaitDelay = grace
	if err := testbed.Start(cfg.Lab.Host.NS, -1, o.cmd); err != nil {
		return nil, nil, fmt.Errorf("start mpirun: %w", err)
	}
	go func() {
		o.err = o.cmd.Wait()
		o.opened() // or never will be
		close(o.ended)
	}()
	return o, ranks, nil
}

// opened is called when the ranks have opened their ends of pipes. With ours closed, whoever
// reads a rank's answers hears of its end.
func (o *openMPI) opened() { closeAll(o.theirs) }

// kill kills the launcher, and its ranks with it, but leaves it time to tell what a rank that
// has failed has told it.
func (o *openMPI) kill() {
	_ = o.cmd.Process.Signal(syscall.SIGTERM)
	time.AfterFunc(grace/10, func() { _ = o.cmd.Process.Kill() })
}

// wait waits until launcher and ranks have ended, and returns why that was, as a rank says in
// its file, if it does.
func (o *openMPI) wait(stderr string) error {
	<-o.ended
	closeAll(o.commands) // with which a rank ends
	for _, a := range o.answers {
		_ = a.SetReadDeadline(time.Now().Add(grace))
		_, _ = io.Copy(io.Discard, a) // it is closed by the rank's end
	}
	closeAll(o.answers)
	if o.err == nil {
		return nil
	}
	for _, file := range append([]string{stderr}, o.stderr...) {
		text, _ := os.ReadFile(file) // there is none of a rank that was not started
		if msg := strings.TrimSpace(string(text)); msg != "" {
			return errors.New(msg)
		}
	}
	return fmt.Errorf("mpirun: %w: %s", o.err, bytes.TrimSpace(o.launcher.Bytes()))
}

func closeAll(lists ...[]*os.File) {
	for _, files := range lists {
		for _, f := range files {
			f.Close()
		}
	}
}
