// SPDX-License-Identifier: Apache-2.0

package eval

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/xspin/xspin/eval/bench"
	"github.com/xspin/xspin/eval/yardstick"
	"github.com/xspin/xspin/matcher"
	"github.com/xspin/xspin/netns/testbed"
)

// XDP verdicts, linux/bpf.h.
const (
	xdpDrop = 1
	xdpPass = 2
)

func benchMatch(ctx context.Context, lab *benchLab, cfg benchConfig, doc *bench.Document) error {
	if err := lab.matchAndDrop(ctx, cfg, doc); err != nil {
		return err
	}
	return lab.matchTimes(ctx, cfg, doc)
}

// table numbers rulesets from 0.
func table(rulesets []matcher.Ruleset) *matcher.Table {
	t := &matcher.Table{Generation: 1, Entries: map[int]matcher.Entry{}}
	for i, r := range rulesets {
		t.Entries[i] = matcher.Entry{Ruleset: r, Context: uint16(i), Format: matcher.FormatByName("packet")}
	}
	return t
}

// local has the table's local rulesets go by the NIC's end of the lab, as they do in use.
func (l *benchLab) local(t *matcher.Table) *matcher.Table {
	t.Local = &matcher.Local{MAC: [6]byte(l.NIC.MAC), Addrs: []netip.Addr{l.NIC.Addr.Addr()}}
	return t
}

// table4x4 is 4 rulesets of 4 rules, of which the last matches udpFrame.
func table4x4() *matcher.Table {
	return table([]matcher.Ruleset{matcher.TCPPort(80), matcher.ICMPEcho(), matcher.UDPPort(benchPort + 1), matcher.UDPPort(benchPort)})
}

// matchAndDrop compares rates of dropping, live.
func (l *benchLab) matchAndDrop(ctx context.Context, cfg benchConfig, doc *bench.Document) error {
	g, err := l.generator()
	if err != nil {
		return err
	}
	defer g.Close()
	var a, b rxRuns
	side := func(runs *rxRuns, load func() (*yardstick.Program, error)) func(context.Context) error {
		return func(context.Context) error {
			return l.receive(g, rxFrame, cfg.duration, runs, func() (receiver, error) { return l.openDropper(load) })
		}
	}
	match := func() (*yardstick.Program, error) { return yardstick.LoadMatch(l.local(table4x4())) }
	if err := bench.Rounds(ctx, cfg.runs, side(&a, match), side(&b, plain(yardstick.Drop))); err != nil {
		return err
	}
	conditions := fmt.Sprintf("%d-byte UDP frames from the in-kernel generator (live frames, batches of 64), sent and dropped on CPU %d; frames that the program saw per second of the generator's run; "+
		"no XDP program on the sending end; nobody sleeps", rxFrame, l.sender)
	as, bs := a.side("4 rulesets of 4 rules, the last one matches, XDP_DROP"), b.side("XDP_DROP at once")
	row, err := bench.Ratio("match/drop4x4_over_drop", bench.AtLeast(0.75), as, bs)
	if err := doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Absolute("match/drop4x4_64B", bench.Higher, as)
	if err := doc.Add(conditions, row, err); err != nil {
		return err
	}
	row, err = bench.Absolute("match/drop_64B", bench.Higher, bs)
	return doc.Add(conditions, row, err)
}

// A dropper is a receiver of which the program drops every frame that is measured.
type dropper struct {
	*yardstick.Program
	lab *benchLab
}

func (l *benchLab) openDropper(load func() (*yardstick.Program, error)) (receiver, error) {
	y, err := l.attach(load)
	if err != nil {
		return nil, err
	}
	if verdict, _, err := y.Time(l.udpFrame(rxFrame), 1); err != nil || verdict != xdpDrop {
		return nil, errors.Join(err, fmt.Errorf("the program returned %d for the frame, not XDP_DROP", verdict), y.Close())
	}
	return dropper{y, l}, nil
}

func (d dropper) counters() (r received, err error) {
	r.packets, err = d.lab.packets()
	return r, err
}

func (dropper) on() string { return "" }

// packets are the frames that the NIC's end has seen.
func (l *benchLab) packets() (n uint64, err error) {
	err = l.NIC.NS.Do(func() error {
		link, err := netlink.LinkByName(l.NIC.Device)
		if err != nil {
			return err
		}
		if link.Attrs().Statistics == nil {
			return fmt.Errorf("%s has no statistics", l.NIC.Device)
		}
		n = link.Attrs().Statistics.RxPackets
		return nil
	})
	return n, err
}

// A missCase is a table, a frame and what matching is to make of it.
type missCase struct {
	name    string
	goal    bench.Goal
	what    string
	table   *matcher.Table
	frame   []byte
	verdict uint32
}

// matchTimes times single runs of the program, less what a plain one takes.
func (l *benchLab) matchTimes(ctx context.Context, cfg benchConfig, doc *bench.Document) error {
	full := l.table256()
	late, first := l.lateFrame(), l.full256Frame(0)
	first[12], first[13] = 0x86, 0xdd // IPv6
	hard, hardFrame := hard256()
	cases := []missCase{
		{"match/miss256_ns", bench.AtMost(300), "256 rulesets of 8 rules and EOM, 8 words in all; the frame agrees with one of them in all but the last word looked at: what services have that differ in addresses and ports; a table whose rulesets share no word takes far longer, see match/miss256_hard_ns, which has no target", full, late, xdpPass},
		{"match/miss256_first_ns", bench.Lower, "the same table; the frame has another EtherType", full, first, xdpPass},
		{"match/hit256_ns", bench.Lower, "the same table; the last ruleset matches", full, l.full256Frame(matcher.MaxRulesets - 1), xdpDrop},
		{"match/hit4x4_ns", bench.Lower, "4 rulesets of 4 rules, the last one matches", l.local(table4x4()), l.udpFrame(rxFrame), xdpDrop},
		{"match/miss256_hard_ns", bench.Lower, "256 rulesets of 8 rules and EOM, no word and mask shared, 2048 in all; every ruleset fails at the last of its rules", hard, hardFrame, xdpPass},
	}
	for _, c := range cases {
		if err := l.matchTime(ctx, cfg, doc, c); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

func (l *benchLab) matchTime(ctx context.Context, cfg benchConfig, doc *bench.Document, c missCase) (err error) {
	match, err := l.timer(func() (*yardstick.Program, error) { return yardstick.LoadMatch(c.table) }, c.frame, c.verdict, cfg.duration)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, match.Close()) }()
	pass, err := l.timer(plain(yardstick.Pass), c.frame, xdpPass, cfg.duration)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pass.Close()) }()
	if err := bench.Rounds(ctx, cfg.runs, match.time, pass.time); err != nil {
		return err
	}
	row, err := bench.Difference(c.name, c.goal, bench.NewSide(c.what, "ns", match.runs), bench.NewSide("a program that passes everything", "ns", pass.runs))
	return doc.Add(fmt.Sprintf("%d-byte frame; BPF_PROG_RUN on CPU %d, attached to nothing, the frame and the table in the cache, branches predictable; time a packet over the plain program's", len(c.frame), l.sender), row, err)
}

// A timer times runs of a program over a frame.
type timer struct {
	*yardstick.Program
	frame  []byte
	repeat int
	cpu    int
	runs   []float64 // ns
}

// timer returns one for runs of about so long together. The program's verdict on the frame
// must be the one wanted.
func (l *benchLab) timer(load func() (*yardstick.Program, error), frame []byte, want uint32, d time.Duration) (*timer, error) {
	y, err := load()
	if err != nil {
		return nil, err
	}
	t := &timer{Program: y, frame: frame, cpu: l.sender}
	verdict, _, err := y.Time(frame, 1)
	if err == nil && verdict != want {
		err = fmt.Errorf("the program returned %d, not %d", verdict, want)
	}
	if err == nil {
		var each time.Duration
		if _, each, err = y.Time(frame, 1000); err == nil {
			t.repeat = int(min(d/max(each, 1), 10_000_000))
		}
	}
	if err != nil {
		return nil, errors.Join(err, y.Close())
	}
	return t, nil
}

func (t *timer) time(context.Context) error {
	return testbed.OnCPU(t.cpu, func() error {
		_, each, err := t.Time(t.frame, t.repeat)
		t.runs = append(t.runs, float64(each.Nanoseconds()))
		return err
	})
}

// kindWord is the last word that the index of table256 looks at.
const kindWord = 13

// table256 is a full table as people write them: all rulesets share the words
// for IPv4, UDP and fragments, and differ in addresses, ports and words of the
// payload, in which they look for a version, a tenant, a service and a kind.
func (l *benchLab) table256() *matcher.Table { return table(l.services(matcher.MaxRulesets)) }

// services are the first rulesets of it.
func (l *benchLab) services(many int) (rulesets []matcher.Ruleset) {
	for i := range many {
		eq := func(index int, mask, value uint32) matcher.Rule {
			return matcher.Rule{Index: index, Mask: mask, Start: value, End: value}
		}
		frame := l.full256Frame(i)
		word := func(index int) uint32 { return binary.BigEndian.Uint32(frame[4*index:]) }
		eom := eq(14, 0x80000000, 0x80000000)
		rulesets = append(rulesets, matcher.Ruleset{
			Name: fmt.Sprintf("service-%d", i),
			Rules: []matcher.Rule{
				eq(3, 0xffffff00, word(3)&0xffffff00),                              // IPv4, no options
				eq(5, 0x3fff00ff, word(5)&0x3fff00ff),                              // UDP, no fragment
				eq(6, 0x0000ffff, word(6)&0x0000ffff),                              // source address, first half
				eq(7, 0xffff0000, word(7)&0xffff0000),                              // and second
				eq(9, 0xffff0000, word(9)&0xffff0000),                              // destination port
				eq(11, 0xffffffff, word(11)),                                       // version: all the same
				{Index: 12, Mask: 0xffffffff, Start: word(12), End: word(12) + 15}, // services of a tenant
				eq(kindWord, 0xffffffff, word(kindWord)),                           // kind
			},
			EOM: &eom,
		})
	}
	return rulesets
}

// full256Frame is a frame that ruleset i of table256 matches, and no other.
func (l *benchLab) full256Frame(i int) []byte {
	f := l.udpFrame(128)
	f[28], f[29] = byte(i>>4), byte(i)                        // source address, second half
	binary.BigEndian.PutUint16(f[36:], uint16(5000+i%32))     // destination port
	binary.BigEndian.PutUint32(f[4*11:], 0x00010002)          // version
	binary.BigEndian.PutUint32(f[4*12:], uint32(i)<<8)        // tenant and service
	binary.BigEndian.PutUint32(f[4*kindWord:], 7+uint32(i)%4) // kind
	return f
}

// lateFrame is a frame that ruleset 0 of table256 wants but for the last word.
func (l *benchLab) lateFrame() []byte {
	f := l.full256Frame(0)
	binary.BigEndian.PutUint32(f[4*kindWord:], ^uint32(0))
	return f
}

// hard256 is the worst table there is: no two of its 2048 rules look at the same
// bits. The frame satisfies all rules of each ruleset but the one that the
// engine looks at last, so that no ruleset drops out early.
func hard256() (*matcher.Table, []byte) { return hardTable(matcher.MaxRulesets) }

// hardTable is the worst one of so many rulesets.
func hardTable(many int) (*matcher.Table, []byte) {
	var rulesets []matcher.Ruleset
	masks := [16]uint32{}
	for i := range masks {
		masks[i] = 0x00010001 << i
	}
	// Fields of the same number of rulesets are looked at in the order of
	// words, then of masks: rule r of ruleset i is field 256*r+i.
	for i := range many {
		rs := matcher.Ruleset{Name: fmt.Sprintf("hard-%d", i)}
		for r := range matcher.MaxRules {
			k := matcher.MaxRulesets*r + i
			mask := masks[k%16]
			rule := matcher.Rule{Index: k / 16, Mask: mask}
			if r == matcher.MaxRules-1 {
				rule.Start, rule.End = mask, mask
			}
			rs.Rules = append(rs.Rules, rule)
		}
		rs.EOM = &matcher.Rule{Index: i / 2, Mask: 0x80000000, Start: 0x80000000, End: 0x80000000}
		rulesets = append(rulesets, rs)
	}
	frame := make([]byte, 512)
	return table(rulesets), frame
}
