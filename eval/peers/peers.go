// SPDX-License-Identifier: Apache-2.0

// Package peers has what XsPIN is compared with: the sources of programs, so that an
// installed binary can build them, and what must be installed for the others.
package peers

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// XSKReceive is a bare AF_XDP receive-and-recycle loop in C.
//
//go:embed c/xsk_rx.c
var XSKReceive []byte

// UDPBatch is a UDP echo, server and client, that sends and receives in batches.
//
//go:embed c/udp_batch.c
var UDPBatch []byte

// A Peer is something that is measured next to XsPIN, or that builds such a program.
type Peer struct {
	Name     string
	For      string   // what is not measured without it
	version  []string // the command that tells its version
	Packages []string // of Debian
}

// All are those there are.
var All = []Peer{
	{"iperf3", "TCP and UDP", []string{"iperf3", "--version"}, []string{"iperf3"}},
	{"MPICH", "MPI by MPICH", []string{"mpichversion"}, []string{"mpich", "libmpich-dev"}},
	{"Open MPI", "MPI by Open MPI", []string{"mpirun.openmpi", "--version"}, []string{"openmpi-bin", "libopenmpi-dev"}},
	{"C compiler", "bare AF_XDP in C, UDP sockets in C, and MPI", []string{"cc", "--version"}, []string{"gcc", "libc6-dev"}},
}

// Version returns the peer's, "" if it is not installed.
func (p Peer) Version() string {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, p.version[0], p.version[1:]...).Output()
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(out), "\n")
	return strings.Join(strings.Fields(line), " ")
}

// Missing returns those that are not installed.
func Missing() []Peer {
	return slices.DeleteFunc(slices.Clone(All), func(p Peer) bool { return p.Version() != "" })
}

// Packages returns the names of the packages of some peers.
func Packages(of []Peer) (names []string) {
	for _, p := range of {
		names = append(names, p.Packages...)
	}
	return names
}

// Install installs the packages of some peers with apt-get, which writes what it does.
func Install(ctx context.Context, of []Peer, to io.Writer) error {
	names := Packages(of)
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	apt := func(args ...string) error {
		cmd := exec.CommandContext(ctx, "apt-get", args...)
		cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		cmd.Stdout, cmd.Stderr = to, to
		return cmd.Run()
	}
	err := apt("update", "-q")
	if errors.Is(err, exec.ErrNotFound) {
		return fmt.Errorf("install %s: this system has no apt-get: install them as it does, or leave --install-peers away", strings.Join(names, ", "))
	}
	// An index that is not to be had may be one that is not needed.
	if err2 := apt(append([]string{"install", "-q", "-y", "--no-install-recommends"}, names...)...); err2 != nil {
		return fmt.Errorf("apt-get install %s: %w", strings.Join(names, " "), errors.Join(err2, err, ctx.Err()))
	}
	return nil
}
