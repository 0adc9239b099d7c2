// SPDX-License-Identifier: Apache-2.0

package datatypes

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/xspin/xspin/eval/gemm"
	"github.com/xspin/xspin/eval/mpich"
	"github.com/xspin/xspin/netns"
)

// A peer is MPICH, which does the same over TCP with receives that are posted before and
// tested between the GEMMs. It has a lab of its own, like the other one but for the NIC, and
// so can take turns with a session: its processes sleep in between.
type peer struct {
	lab  *netns.Lab
	pair *mpich.Pair
}

func startPeer(ctx context.Context, lab *netns.Lab, s Setup) (_ *peer, err error) {
	p := &peer{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	if p.lab, err = netns.Up(netns.LabConfig{
		NIC:  netns.End{Namespace: lab.NIC.Namespace + "-mpich"},
		Host: netns.End{Namespace: lab.Host.Namespace + "-mpich"},
		MTU:  lab.MTU, Queues: lab.Queues, Path: lab.Path,
	}); err != nil {
		return nil, err
	}
	if p.pair, err = mpich.Start(ctx, mpich.PairConfig{Lab: p.lab, ReceiverCPU: s.AppCPU, SenderCPU: s.SenderCPU}); err != nil {
		return nil, err
	}
	// The library with the GEMM is built now, or not at all.
	if _, err = p.pair.Compute(ctx, mpich.Compute{Dim: leastMatrix, GEMMs: 1}, 1); err != nil {
		return nil, err
	}
	return p, nil
}

// missing says why there is no peer, in a sentence.
func missing(err error) string {
	if errors.Is(err, mpich.ErrMissing) {
		_, install, _ := strings.Cut(mpich.ErrMissing.Error(), ": ")
		return "no figures of MPICH, which is not installed: " + install
	}
	if errors.Is(err, gemm.ErrNoGo) {
		return "no figures of MPICH: " + gemm.ErrNoGo.Error()
	}
	return fmt.Sprintf("no figures of MPICH: %v", err)
}

// prepare says what all trials from now on transfer.
func (p *peer) prepare(ctx context.Context, l *layout) error {
	if err := p.pair.Prepare(ctx, mpich.Transfer{Type: l.data.Type(), Count: l.Count, Messages: l.Parallel}); err != nil {
		return err
	}
	_, err := p.pair.Receive(ctx, warmup)
	return err
}

// try measures all that is compared, once.
func (p *peer) try(ctx context.Context, g GEMMs) (x trial, err error) {
	c := mpich.Compute{Dim: g.N, GEMMs: g.Count}
	compute, err := p.pair.Compute(ctx, c, 1)
	if err != nil {
		return x, err
	}
	rounds, err := p.pair.Receive(ctx, 1)
	if err != nil {
		return x, err
	}
	both, err := p.pair.Overlap(ctx, c, 1)
	if err != nil {
		return x, err
	}
	fpspin, err := p.pair.Detect(ctx, c, 1)
	if err != nil {
		return x, err
	}
	o := both[0]
	return trial{
		compute: compute[0], transfer: rounds.Times[0], both: o.Total, computed: o.Computed, detected: o.Detected,
		ratio: fpspin[0].Ratio(),
	}, nil
}

func (p *peer) close() (err error) {
	if p == nil {
		return nil
	}
	if p.pair != nil {
		err = p.pair.Close()
	}
	if p.lab != nil {
		err = errors.Join(err, p.lab.Down())
	}
	return err
}
